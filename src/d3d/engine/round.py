"""The one record of a round: in memory, in JSON lines, in traces, in plans and in benchmarks."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, cast, get_args

from d3d.engine.clock import Span

FinishReason = Literal["stop", "length", "cancelled"]

Readiness = Literal["hit", "late", "miss", "unprepared"]
"""State of the successor that a round wanted: ready in time; waited for; not among those prepared;
none was being prepared (the first round, and rounds after one in which the worker was not
asked)."""


class TokenLogprob(NamedTuple):
    """Natural log-probability of a committed token after all processing, and the best
    alternatives."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


class Preparation(NamedTuple):
    """How a round of async mode came by its draft, or why it has none."""

    readiness: Readiness
    cause: str | None = None
    """Why the round has no draft; None if it has one, or wanted none."""
    passes: tuple[Span, ...] = ()
    """Drafter passes reported since the previous round, in seconds of `time.perf_counter`."""
    notes: tuple[str, ...] = ()
    """What happened to the draft worker since then, in words."""
    fitted: bool | None = None
    """Whether the draft is a prepared successor, in time or late; None if unknown."""


class RoundTimes(NamedTuple):
    """When a round's parts ran, in seconds; see `Round`."""

    started: float
    t_draft: float
    t_verify: float
    device_span: Span | None = None


class Round(NamedTuple):
    """One round of one request. Times in seconds; 0 if unknown."""

    draft_length: int
    num_accepted: int
    num_committed: int
    t_draft: float
    """From the start of the round until the draft is there. In async mode: drafting that nothing
    hides."""
    t_verify: float
    started: float = 0.0
    """Start of the round, in seconds of `time.perf_counter`."""
    preparation: Preparation | None = None
    """Async mode only."""
    device_span: Span | None = None
    """Start and end of the verification by the device's own clock (CUDA), in seconds of
    `time.perf_counter`."""
    looked_up: bool = False
    """Whether the draft was copied from the text by prompt lookup."""
    num_slots: int | None = 0
    """Fused mode: slots of the pass, beside its anchor and its drafted tokens; None if a file does
    not say."""
    request_id: int = 0
    number: int = 1
    """Counts a request's rounds from 1; 0 is the prefill's first token, which belongs to no
    round."""
    token_ids: tuple[int, ...] = ()
    """What it committed: accepted tokens, then the bonus token unless a stop cut the round."""
    text: str = ""
    """What may be shown now; the texts of a request's rounds, joined, are its answer."""
    finish_reason: FinishReason | None = None
    logprobs: tuple[TokenLogprob, ...] = ()
    fault: str | None = None
    """Why this request is not drafted for any more from this round on, if so."""

    @property
    def num_nodes(self) -> int:
        """Drafted tokens that were verified; a draft tree has more of them than its depth."""
        return self.draft_length

    @property
    def readiness(self) -> Readiness | None:
        return None if self.preparation is None else self.preparation.readiness

    @property
    def fitted(self) -> bool | None:
        return None if self.preparation is None else self.preparation.fitted

    @property
    def verification(self) -> Span:
        """When the target's pass ran."""
        if self.device_span is not None:
            return self.device_span
        start = self.started + self.t_draft
        return start, start + self.t_verify

    def to_json(self) -> dict[str, Any]:
        """What files keep of it: counts and times, and what is not its default. `from_json` reads
        it back."""
        fields: dict[str, Any] = {name: getattr(self, name) for name in _COUNTS + _TIMES}
        if self.preparation is not None:
            fields |= {"readiness": self.readiness}
            extra = {"cause": self.preparation.cause, "fitted": self.fitted}
            fields |= {name: value for name, value in extra.items() if value is not None}
        if self.looked_up:
            fields["looked_up"] = True
        if self.num_slots != 0:
            fields["num_slots"] = self.num_slots
        return fields

    @staticmethod
    def from_json(value: Any) -> Round:
        """Reads `to_json`, and the arrays of benchmark rows of format 1. Raises ValueError for
        anything else."""
        if isinstance(value, Round):
            return value
        if isinstance(value, list | tuple):
            value = dict(zip(_FORMAT_1, value, strict=False))
            value.setdefault("num_slots", None)
        if not isinstance(value, dict):
            raise ValueError(f"a round is an object or an array, not {type(value).__name__}")
        drafted, accepted, committed = (_count(value, name) for name in _COUNTS)
        if accepted > drafted:
            raise ValueError("a round accepted more than was drafted")
        t_draft, t_verify = (_seconds(value, name) for name in _TIMES)
        num_slots = value.get("num_slots", 0)
        return Round(
            drafted,
            accepted,
            committed,
            t_draft,
            t_verify,
            preparation=_preparation(value),
            looked_up=value.get("looked_up") is True,
            num_slots=None if num_slots is None else _count(value, "num_slots", 0),
        )


_COUNTS = ("draft_length", "num_accepted", "num_committed")
_TIMES = ("t_draft", "t_verify")
_FORMAT_1 = (*_COUNTS, *_TIMES, "readiness", "looked_up", "num_slots", "fitted")


def _count(fields: dict[str, Any], name: str, default: int | None = None) -> int:
    value = fields.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{name} is not a count: {value!r}")
    return value


def _seconds(fields: dict[str, Any], name: str) -> float:
    value = fields.get(name, 0.0)
    if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
        raise ValueError(f"{name} is not a number of seconds: {value!r}")
    return float(value)


def _preparation(fields: dict[str, Any]) -> Preparation | None:
    readiness, fitted = fields.get("readiness"), fields.get("fitted")
    if readiness is None:
        return None
    if readiness not in get_args(Readiness):
        raise ValueError(f"readiness is none of {', '.join(get_args(Readiness))}: {readiness!r}")
    cause = fields.get("cause")
    return Preparation(
        cast("Readiness", readiness),
        None if cause is None else str(cause),
        fitted=fitted if isinstance(fitted, bool) else None,
    )
