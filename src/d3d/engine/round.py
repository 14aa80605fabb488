"""The record of a round: in memory, in JSON lines, in traces, in plans and in benchmarks."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, cast, get_args

from d3d.engine.clock import Span

FinishReason = Literal["stop", "length", "cancelled"]

Readiness = Literal["hit", "late", "miss", "unprepared"]
"""State of the successor that a round wanted: ready in time (hit), waited for (late), not among
those prepared (miss), or none in preparation (unprepared: the first round, and rounds after one in
which the worker was idle)."""


class TokenLogprob(NamedTuple):
    """Natural log-probability of a committed token after all processing, and of the best
    alternatives."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


class Preparation(NamedTuple):
    """Origin of an async round's draft, or the reason why it has none."""

    readiness: Readiness
    cause: str | None = None
    """Reason why the round has no draft; None if it has one, or wanted none."""
    passes: tuple[Span, ...] = ()
    """Drafter passes reported since the previous round, in seconds of `time.perf_counter`."""
    notes: tuple[str, ...] = ()
    """Messages about the draft worker since the previous round."""
    fitted: bool | None = None
    """True if the draft is a prepared successor, in time or late; None if unknown."""


class RoundTimes(NamedTuple):
    """Times of a round's parts, in seconds; see `Round`."""

    started: float
    t_draft: float
    t_verify: float
    device_span: Span | None = None


class Round(NamedTuple):
    """One round of one request. Times in seconds; 0 if unknown."""

    draft_length: int
    """Most drafted tokens that could be accepted: all of a chain, or the depth of a tree."""
    num_accepted: int
    num_committed: int
    t_draft: float
    """Start of the round until the draft is ready. In async mode: exposed draft time."""
    t_verify: float
    started: float = 0.0
    """Start of the round, in seconds of `time.perf_counter`."""
    preparation: Preparation | None = None
    """Async mode only."""
    device_span: Span | None = None
    """Start and end of the verification by the device's own clock (CUDA), in seconds of
    `time.perf_counter`."""
    looked_up: bool = False
    """True if prompt lookup copied the draft."""
    num_slots: int | None = 0
    """Fused mode: slots of the pass, beside its anchor and drafted tokens; None if a file does not
    say."""
    request_id: int = 0
    number: int = 1
    """Number of the round within its request, from 1; 0 for the prefill's first token."""
    token_ids: tuple[int, ...] = ()
    """Committed tokens: the accepted ones, then the bonus token unless a stop cut the round."""
    text: str = ""
    """Text that may be shown now; the texts of all rounds, joined, are the answer."""
    finish_reason: FinishReason | None = None
    logprobs: tuple[TokenLogprob, ...] = ()
    fault: str | None = None
    """Reason why drafting for this request ends with this round; None if it goes on."""
    num_branched: int = 0
    """In a draft tree: drafted tokens beyond `draft_length`."""

    @property
    def num_nodes(self) -> int:
        """Number of drafted tokens verified."""
        return self.draft_length + self.num_branched

    @property
    def readiness(self) -> Readiness | None:
        return None if self.preparation is None else self.preparation.readiness

    @property
    def fitted(self) -> bool | None:
        return None if self.preparation is None else self.preparation.fitted

    @property
    def verification(self) -> Span:
        """Start and end of the target's pass."""
        if self.device_span is not None:
            return self.device_span
        start = self.started + self.t_draft
        return start, start + self.t_verify

    def to_json(self) -> dict[str, Any]:
        """JSON object: counts, times, and fields that differ from their defaults. Inverse of
        `from_json`."""
        fields: dict[str, Any] = {name: getattr(self, name) for name in _COUNTS + _TIMES}
        if self.preparation is not None:
            fields |= {"readiness": self.readiness}
            extra = {"cause": self.preparation.cause, "fitted": self.fitted}
            fields |= {name: value for name, value in extra.items() if value is not None}
        if self.looked_up:
            fields["looked_up"] = True
        if self.num_slots != 0:
            fields["num_slots"] = self.num_slots
        if self.num_branched:
            fields["num_branched"] = self.num_branched
        return fields

    @staticmethod
    def from_json(value: Any) -> Round:
        """Read `to_json`'s output, or a row array of benchmark format 1. Raises ValueError."""
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
            num_branched=_count(value, "num_branched", 0),
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
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e9:
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
