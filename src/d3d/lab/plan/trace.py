"""Rounds as the planner reads them: recorded by other commands, or made from a histogram."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import BaseModel, Field

from d3d.engine import metrics
from d3d.engine.round import Round
from d3d.engine.trace import read_trace as read_timeline
from d3d.errors import InvalidRequest
from d3d.inputs import json_or_none, read_text, validated
from d3d.methods.base import MOST_TOKENS

MODELLED_MODES = ("plain", "serial", "fused", "async")

MODELLED_ROUNDS = 2000
"""Most rounds to model of a histogram, which takes about a second."""

DEFAULT_CONTEXT = 256
"""Committed tokens before a round if the trace does not say."""

Recall = dict[int, tuple[float | None, ...]]
"""By number of guesses: the share of rounds that kept 0, 1, ... tokens whose bonus token was among
them."""


class TracedRound(NamedTuple):
    """A round and its place in its request."""

    record: Round
    context: int
    """Committed tokens before the round."""
    first: bool = False
    """True if it is a request's first round, as far as known; a trace's first one always is."""

    @property
    def hit(self) -> bool | None:
        """True if the successor it wanted had been prepared, in time or late; None if unknown."""
        fitted, readiness = self.record.fitted, self.record.readiness
        return fitted if fitted is not None or readiness in (None, "late") else readiness == "hit"


class RecordedTime(NamedTuple):
    """Duration of a recorded run and its dtype and threads, if known."""

    mode: str
    tpot_s: float
    tokens: int
    """Generated tokens after the first."""
    dtype: str | None = None
    threads: int | None = None


@dataclass(frozen=True)
class Trace:
    """Rounds of one way of decoding."""

    source: str
    mode: str
    draft_length: int
    """Longest draft, in tokens."""
    rounds: tuple[TracedRound, ...]
    recall: Recall | None = None
    hit_rate_at: tuple[float, ...] | None = None
    """Recorded hit rates after verdicts that kept 0, 1, ... tokens."""
    hits_by_budget: Recall | None = None
    """Hit rates by outcome budget, from replayed rounds."""
    measured: RecordedTime | None = None
    fallbacks: int = 0
    """Async rounds that got no draft because the worker was too slow or failed; not modelled."""

    @property
    def records(self) -> list[Round]:
        return [traced.record for traced in self.rounds]

    @property
    def histogram(self) -> tuple[int, ...]:
        """Drafted rounds by num_accepted, 0 to draft_length."""
        drafted = (record for record in self.records if record.draft_length)
        return metrics.histogram(drafted, self.draft_length)

    @property
    def acceptance_length(self) -> float:
        return metrics.acceptance_length(self.records)

    def shortened(self, draft_length: int) -> Trace:
        """The trace as if drafts had been cut to draft_length tokens. Later rounds keep their
        context. Raises InvalidRequest for a length outside of the trace's."""
        if not 1 <= draft_length <= self.draft_length:
            raise InvalidRequest(
                f"draft_length: {draft_length} is not within 1 and that of the trace, "
                f"{self.draft_length}"
            )
        if draft_length == self.draft_length:
            return self
        recall = self.recall and {top: row[: draft_length + 1] for top, row in self.recall.items()}
        return Trace(
            self.source,
            self.mode,
            draft_length,
            tuple(
                traced._replace(record=_cut(traced.record, draft_length)) for traced in self.rounds
            ),
            recall=recall,
            fallbacks=self.fallbacks,
        )


def _cut(record: Round, draft_length: int) -> Round:
    lost = max(0, record.num_accepted - draft_length)
    return record._replace(
        draft_length=min(record.draft_length, draft_length),
        num_accepted=record.num_accepted - lost,
        num_committed=record.num_committed - lost,
        preparation=None,
    )


def in_order(records: Iterable[Round], context: int) -> Iterator[TracedRound]:
    """The rounds of one request. context: committed tokens before the first of them."""
    for number, record in enumerate(records):
        yield TracedRound(record, context, number == 0)
        context += record.num_committed


def bare_round(draft_length: int, num_accepted: int, num_committed: int, **fields: Any) -> Round:
    """A round of which only the counts are known."""
    return Round(
        draft_length, num_accepted, num_committed, 0.0, 0.0, **{"num_slots": None, **fields}
    )


def of_histogram(
    histogram: Sequence[int], *, source: str, mode: str = "serial", context: int = DEFAULT_CONTEXT
) -> Trace:
    """Rounds in an arbitrary order, always the same. histogram: rounds by num_accepted, from 0;
    only the proportions of large counts matter. Raises InvalidRequest."""
    if len(histogram) < 2 or min(histogram) < 0 or not sum(histogram):
        raise InvalidRequest(
            f"{source}: a histogram counts rounds that kept 0, 1, ... tokens: two numbers or more, "
            "not all 0"
        )
    width = len(histogram) - 1
    _check_length(width)
    kept = _shuffled(scaled(histogram, MODELLED_ROUNDS))
    rounds = (TracedRound(bare_round(width, count, count + 1), context) for count in kept)
    return Trace(source, mode, width, tuple(rounds))


def scaled(histogram: Sequence[int], most: int) -> list[int]:
    """The histogram as it is, or in the same proportions with a sum of `most` if that is less: the
    share of rounds that kept k tokens or more is right to within half a round of these."""
    total = sum(histogram)
    if total <= most:
        return list(histogram)
    marks = [round(most * reached / total) for reached in itertools.accumulate(histogram)]
    return [after - before for before, after in itertools.pairwise([0, *marks])]


def _shuffled(histogram: Sequence[int]) -> list[int]:
    """Kept tokens of each round, in an order that is always the same."""
    kept = [place for place, count in enumerate(histogram) for _ in range(count)]
    random.Random(0).shuffle(kept)
    return kept


def _check_length(draft_length: int) -> None:
    if not 1 <= draft_length <= MOST_TOKENS:
        raise InvalidRequest(f"draft length: {draft_length} is not within 1 and {MOST_TOKENS}")


def of_mean(
    acceptance_length: float,
    draft_length: int,
    *,
    rounds: int = 1000,
    context: int = DEFAULT_CONTEXT,
) -> Trace:
    """Rounds in which each drafted token is kept with the same probability a, given that those
    before it are: 1 + a + a^2 + ... + a^draft_length = acceptance_length (Leviathan et al., arXiv
    2211.17192, equation 1). Raises InvalidRequest for an impossible mean."""
    if draft_length < 1 or not 1 <= acceptance_length <= draft_length + 1:
        raise InvalidRequest(
            f"acceptance length: {acceptance_length:g} is impossible with drafts of "
            f"{draft_length}; a round commits from 1 to {draft_length + 1} tokens"
        )
    _check_length(draft_length)
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        too_few = sum(middle**k for k in range(draft_length + 1)) < acceptance_length
        low, high = (middle, high) if too_few else (low, middle)
    marks = [round(rounds * high**k) for k in range(draft_length + 1)] + [0]
    histogram = [marks[k] - marks[k + 1] for k in range(draft_length + 1)]
    return of_histogram(histogram, source="the same probability at each position", context=context)


def read_trace(path: Path) -> Trace:
    """Reads a file of `d3d generate --json`, `d3d generate --trace` or `d3d evaluate`. Raises
    InvalidRequest for anything else, and for rounds of auto mode."""
    trace = _read(path)
    if trace.mode == "auto":
        raise InvalidRequest(
            f"{path}: rounds of auto mode belong to several modes, which can't be told apart "
            "here; record one of the modes"
        )
    return trace


def _read(path: Path) -> Trace:
    record, advice = _read_json(path), "record it again"
    if "traceEvents" in record:
        about = validated(_RunNotes, record.get("otherData") or {}, path, advice)
        return _of_timeline(read_timeline(path), about, str(path))
    if "usage" in record and "timing" in record:
        return _of_answer(validated(_Answer, record, path, advice), str(path))
    if "num_accepted_histogram" in record:
        return _of_evaluation(validated(_Evaluation, record, path, advice), str(path))
    raise InvalidRequest(
        f"{path}: no rounds in it; give a file of d3d generate --json, d3d generate --trace or "
        "d3d evaluate, or a benchmark's directory"
    )


def _read_json(path: Path) -> dict[str, Any]:
    """The JSON object of a file, or of its last line that has one. Raises InvalidRequest."""
    text = read_text(path)
    for part in (text, *reversed(text.splitlines())):
        record = json_or_none(part)
        if isinstance(record, dict):
            return record
    raise InvalidRequest(f"{path}: it holds no JSON object")


Count = Annotated[int, Field(ge=0, le=1 << 40)]
Tokens = Annotated[int, Field(ge=0, le=1 << 20)]
Share = Annotated[float, Field(ge=0, le=1)]
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class _RunNotes(BaseModel):
    """Facts of a run that `d3d generate --trace` stores beside the rounds."""

    mode: str | None = None
    dtype: str | None = None
    threads: int | None = None
    prompt_tokens: Tokens = DEFAULT_CONTEXT
    tpot_s: Seconds | None = None


class _Usage(BaseModel):
    prompt_tokens: Tokens
    completion_tokens: Tokens


class _Timing(BaseModel):
    tpot_s: Seconds | None


class _Speculation(BaseModel):
    mode: str
    num_accepted_histogram: list[Tokens]
    undrafted_rounds: Tokens = 0
    lookup_rounds: Tokens = 0
    hit_rate_at: list[Share | None] = []


class _Answer(BaseModel):
    """What is read of `d3d generate --json`."""

    usage: _Usage
    timing: _Timing
    speculation: _Speculation | None


class _Evaluation(BaseModel):
    """What is read of `d3d evaluate`."""

    num_accepted_histogram: list[Count]
    mode: str = "serial"
    bonus_recall: dict[int, list[Share | None]] = {}
    hit_rate_at: dict[int, list[Share | None]] = {}


def _of_answer(answer: _Answer, source: str) -> Trace:
    usage, speculation, tpot = answer.usage, answer.speculation, answer.timing.tpot_s
    left, context = usage.completion_tokens - 1, usage.prompt_tokens + 1
    mode = "plain" if speculation is None else speculation.mode
    measured = None if tpot is None else RecordedTime(mode, tpot, left)
    if speculation is None:
        rounds = [bare_round(0, 0, 1)] * left
        return Trace(source, mode, 0, tuple(in_order(rounds, context)), measured=measured)
    histogram = speculation.num_accepted_histogram
    trace = of_histogram(histogram, source=source, mode=mode)
    if sum(histogram) > usage.completion_tokens:
        raise InvalidRequest(f"{source}: more rounds than tokens; record it again")
    undrafted, copied = speculation.undrafted_rounds, speculation.lookup_rounds
    rounds = []
    for accepted in _shuffled(histogram):
        is_empty = undrafted > 0 and not accepted
        undrafted -= is_empty
        looked_up = not is_empty and copied > 0  # the file has only their number, which is enough
        copied -= looked_up
        committed = min(accepted + 1, left)  # a stop cut the last round
        left -= committed
        length = 0 if is_empty else trace.draft_length
        rounds.append(bare_round(length, accepted, committed, looked_up=looked_up))
    rates = tuple(rate or 0.0 for rate in speculation.hit_rate_at)
    return replace(
        trace,
        rounds=tuple(in_order(rounds, context)),
        hit_rate_at=rates or None,
        measured=measured,
    )


def _of_evaluation(record: _Evaluation, source: str) -> Trace:
    trace = of_histogram(record.num_accepted_histogram, source=source, mode=record.mode)
    recall = {top: tuple(row) for top, row in record.bonus_recall.items() if top > 0}
    hits = {budget: tuple(row) for budget, row in record.hit_rate_at.items() if budget > 0}
    return replace(trace, recall=recall or None, hits_by_budget=hits or None)


def _of_timeline(records: Sequence[Round], about: _RunNotes, source: str) -> Trace:
    if not any(record.num_slots for record in records):  # older files have no slots of fused mode
        records = [record._replace(num_slots=None) for record in records]
    longest = max(record.draft_length for record in records)
    is_async = any(record.preparation is not None for record in records)
    mode = about.mode or ("async" if is_async else "serial" if longest else "plain")
    tpot, tokens = about.tpot_s, sum(record.num_committed for record in records)
    if tpot is None:
        last = records[-1]
        spent = last.started + last.t_draft + last.t_verify - records[0].started
        tpot = metrics.ratio(spent, tokens)
    return Trace(
        source,
        mode,
        longest,
        tuple(in_order(records, about.prompt_tokens + 1)),
        measured=RecordedTime(mode, tpot, tokens, about.dtype, about.threads),
        fallbacks=count_fallbacks(records),
    )


def count_fallbacks(records: Iterable[Round]) -> int:
    """Async rounds that wanted a draft and got none."""
    return sum(record.preparation is not None and not record.draft_length for record in records)
