"""Rounds as they went: what was drafted and kept, recorded by other commands or made of a
histogram."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from d3d.core.types import RoundStats
from d3d.decoding.trace_file import read_trace as read_timeline
from d3d.errors import InvalidRequest

DEFAULT_CONTEXT = 256
"""Committed tokens before a round, where the trace does not say."""

Recall = dict[int, tuple[float | None, ...]]
"""By number of guesses: share of the rounds that kept 0, 1, ... tokens in which the bonus token was
among them."""


class TracedRound(NamedTuple):
    """One round's verdict."""

    draft_length: int
    num_accepted: int
    num_committed: int
    context: int
    """Committed tokens when it began."""
    hit: bool | None = None
    """Whether its block was among the successors prepared before; None where that was not
    recorded."""
    looked_up: bool = False
    """Whether its draft was copied from the text, so that no drafter's pass was needed."""
    first: bool = False
    """Whether a request begins with it, as far as is told; a trace does in any case."""
    num_slots: int | None = None
    """Fused mode: of its pass; None where that was not recorded."""


class Measured(NamedTuple):
    """What a run took: the mode's name, seconds a token after the first, and, where it was
    recorded, how it was computed."""

    mode: str
    tpot_s: float
    tokens: int
    dtype: str | None = None
    threads: int | None = None


@dataclass(frozen=True)
class Trace:
    """Rounds of one way of decoding."""

    source: str
    mode: str
    draft_length: int
    """Most tokens a draft."""
    rounds: tuple[TracedRound, ...]
    recall: Recall | None = None
    hit_rate_at: tuple[float, ...] | None = None
    """Recorded shares of hits behind verdicts that kept 0, 1, ... tokens."""
    hits_by_budget: Recall | None = None
    """The same as rounds were replayed with several budgets of outcomes."""
    measured: Measured | None = None
    fallbacks: int = 0
    """Rounds of async mode that wanted a draft and had none, because the worker failed to bring one
    in time: no model foresees them."""

    @property
    def histogram(self) -> tuple[int, ...]:
        """Drafted rounds by num_accepted, 0 to draft_length."""
        kept = [one.num_accepted for one in self.rounds if one.draft_length]
        return tuple(kept.count(place) for place in range(self.draft_length + 1))

    @property
    def acceptance_length(self) -> float:
        return sum(one.num_committed for one in self.rounds) / len(self.rounds)

    def shortened(self, draft_length: int) -> Trace:
        """What shorter drafts would have kept: their own tokens at most. Positions of later rounds
        move, which shares do not notice."""
        if not 1 <= draft_length <= self.draft_length:
            raise InvalidRequest(
                f"draft length: {draft_length} is not within 1 and that of the trace, {self.draft_length}"
            )
        if draft_length == self.draft_length:
            return self
        rounds = tuple(_cut(one, draft_length) for one in self.rounds)
        recall = (
            None
            if self.recall is None
            else {top: row[: draft_length + 1] for top, row in self.recall.items()}
        )
        return replace(
            self,
            draft_length=draft_length,
            rounds=rounds,
            recall=recall,
            hit_rate_at=None,
            hits_by_budget=None,
            measured=None,
        )


def _cut(one: TracedRound, draft_length: int) -> TracedRound:
    lost = max(0, one.num_accepted - draft_length)
    return one._replace(
        draft_length=min(one.draft_length, draft_length),
        num_accepted=one.num_accepted - lost,
        num_committed=one.num_committed - lost,
        hit=None,
    )


def of_histogram(
    histogram: Sequence[int], *, source: str, mode: str = "serial", context: int = DEFAULT_CONTEXT
) -> Trace:
    """Rounds in an order of no meaning, always the same. histogram: rounds by num_accepted, from 0.
    Raises InvalidRequest."""
    if len(histogram) < 2 or min(histogram) < 0 or not sum(histogram):
        raise InvalidRequest(
            f"{source}: a histogram counts rounds that kept 0, 1, ... tokens, two numbers or more and not all 0"
        )
    kept = [place for place, count in enumerate(histogram) for _ in range(count)]
    random.Random(0).shuffle(kept)
    width = len(histogram) - 1
    return Trace(
        source, mode, width, tuple(TracedRound(width, place, place + 1, context) for place in kept)
    )


def of_mean(
    acceptance_length: float,
    draft_length: int,
    *,
    rounds: int = 1000,
    context: int = DEFAULT_CONTEXT,
) -> Trace:
    """As if each drafted token were kept with one and the same chance a, given that those before it
    are: the mean of a round is then 1 + a + a^2 + ... + a^draft_length (Leviathan et al., arXiv
    2211.17192, equation 1). Raises InvalidRequest for a mean that can't be."""
    if draft_length < 1 or not 1 <= acceptance_length <= draft_length + 1:
        raise InvalidRequest(
            f"acceptance length: {acceptance_length:g} can't be, with drafts of {draft_length}; "
            f"a round commits from 1 to {draft_length + 1} tokens"
        )
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (
            (middle, high)
            if sum(middle**k for k in range(draft_length + 1)) < acceptance_length
            else (low, middle)
        )
    reached = [rounds * high**k for k in range(draft_length + 1)] + [0.0]
    marks = [round(value) for value in reached]
    histogram = [marks[k] - marks[k + 1] for k in range(draft_length + 1)]
    return of_histogram(histogram, source="the same chance at each place", context=context)


def read_trace(path: Path) -> Trace:
    """What `d3d generate --json`, `d3d generate --trace` or `d3d evaluate` have written. Raises
    InvalidRequest for anything else, and for rounds of auto mode."""
    trace = _read(path)
    if trace.mode == "auto":
        raise InvalidRequest(
            f"{path}: rounds of auto mode went through several modes, which can't be told apart here; record one of them"
        )
    return trace


def _read(path: Path) -> Trace:
    record = read_json(path)
    try:
        if "traceEvents" in record:
            return _of_timeline(read_timeline(path), record.get("otherData") or {}, str(path))
        if "usage" in record and "timing" in record:
            return _of_answer(record, str(path))
        if "num_accepted_histogram" in record:
            return _of_evaluation(record, str(path))
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise InvalidRequest(
            f"{path}: it looks like a trace, and is damaged ({type(error).__name__}: {error}); record it again"
        ) from error
    raise InvalidRequest(
        f"{path}: no rounds in it; give what d3d generate --json, d3d generate --trace or d3d evaluate writes, or a benchmark's directory"
    )


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object of a file, or of its last line that has one. Raises InvalidRequest."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"{path} can't be read: {error}") from error
    for part in (text, *reversed(text.splitlines())):
        try:
            record = json.loads(part)
        except ValueError:
            continue
        if isinstance(record, dict):
            return record
    raise InvalidRequest(f"{path}: it holds no JSON object")


def _of_answer(record: dict[str, Any], source: str) -> Trace:
    usage, speculation = record["usage"], record["speculation"]
    further, prompt = usage["completion_tokens"] - 1, usage["prompt_tokens"]
    mode = "plain" if speculation is None else speculation["mode"]
    tpot = record["timing"]["tpot_s"]
    measured = None if tpot is None else Measured(mode, tpot, further)
    if speculation is None:
        return Trace(
            source,
            mode,
            0,
            tuple(TracedRound(0, 0, 1, prompt + place + 1) for place in range(further)),
            measured=measured,
        )
    trace = of_histogram(speculation["num_accepted_histogram"], source=source, mode=mode)
    rounds: list[TracedRound] = []
    context, undrafted, copied = (
        prompt + 1,
        speculation.get("undrafted_rounds", 0),
        speculation.get("lookup_rounds", 0),
    )
    for one in trace.rounds:
        empty = undrafted > 0 and not one.num_accepted
        undrafted -= empty
        committed = min(
            one.num_committed, prompt + 1 + further - context
        )  # a stop has cut the last
        looked_up = not empty and copied > 0  # which ones is not told, and only how many matters
        copied -= looked_up
        length = 0 if empty else trace.draft_length
        rounds.append(
            TracedRound(
                length, one.num_accepted, committed, context, looked_up=looked_up, first=not rounds
            )
        )
        context += committed
    rates = [0.0 if rate is None else rate for rate in speculation.get("hit_rate_at", ())]
    return replace(trace, rounds=tuple(rounds), hit_rate_at=tuple(rates) or None, measured=measured)


def _of_evaluation(record: dict[str, Any], source: str) -> Trace:
    trace = of_histogram(
        record["num_accepted_histogram"], source=source, mode=record.get("mode", "serial")
    )
    recall = {int(top): tuple(row) for top, row in record.get("bonus_recall", {}).items()}
    hits = {int(budget): tuple(row) for budget, row in record.get("hit_rate_at", {}).items()}
    return replace(trace, recall=recall or None, hits_by_budget=hits or None)


def hit_of(readiness: str | None, fitted: bool | None) -> bool | None:
    """Whether a successor fitted, in time or late; None where that is not known."""
    if fitted is not None or readiness in (None, "late"):
        return fitted
    return readiness == "hit"


def _of_timeline(stats: Sequence[RoundStats], about: dict[str, Any], source: str) -> Trace:
    """`about`: what the file says of the run, if anything."""
    rounds: list[TracedRound] = []
    context = about.get("prompt_tokens", DEFAULT_CONTEXT) + 1
    any_slots = any(one.num_slots for one in stats)  # an older file has none of fused mode's
    for one in stats:
        hit = (
            None
            if one.preparation is None
            else hit_of(one.preparation.readiness, one.preparation.fitted)
        )
        slots = one.num_slots if any_slots else None
        rounds.append(
            TracedRound(
                one.draft_length,
                one.num_accepted,
                one.num_committed,
                context,
                hit,
                one.looked_up,
                not rounds,
                slots,
            )
        )
        context += one.num_committed
    longest = max(one.draft_length for one in rounds)
    is_async = any(one.preparation is not None for one in stats)
    mode = about.get("mode", "async" if is_async else "serial" if longest else "plain")
    tpot, tokens = about.get("tpot_s"), sum(one.num_committed for one in rounds)
    if tpot is None:
        tpot = (
            stats[-1].started + stats[-1].t_draft + stats[-1].t_verify - stats[0].started
        ) / tokens
    measured = Measured(mode, tpot, tokens, about.get("dtype"), about.get("threads"))
    fallbacks = sum(one.preparation is not None and not one.draft_length for one in stats)
    return Trace(source, mode, longest, tuple(rounds), measured=measured, fallbacks=fallbacks)
