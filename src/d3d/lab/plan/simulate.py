"""A model of rounds: when target and drafter run, given the cost of each pass and the verdicts.

It simulates the events of the target and the draft worker by the rules of
`d3d.methods.async_.coordinator` with the miss policy `draft_now`. It computes no token and measures
nothing: all its results are modelled."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from d3d.engine.metrics import ratio
from d3d.errors import InvalidRequest
from d3d.lab.plan.costs import APART, Contention, Costs
from d3d.lab.plan.trace import TracedRound


class RoundWork(NamedTuple):
    """The passes of a round: seconds, each alone on its device."""

    verify_s: float
    fresh_s: float
    """A draft for the true prefix: the price of a miss, and of every round in serial mode."""
    packed_s: float
    """Preparing the successors of this round's block."""
    hit: bool | None
    """True if this round's block is among the successors prepared in the round before; None if it
    wants none."""
    first: bool = False
    """True if it is a request's first round."""
    read_s: float = 0.0
    """Seconds of a first round's draft, for which the worker reads the prompt in async mode; 0 if
    it costs no more than others."""


class ModelledTimes(NamedTuple):
    """When the parts of a round ran, in seconds since the first round began."""

    started: float
    verify_from: float
    verify_until: float
    ended: float
    prepared_until: float
    late: bool
    """True if its block was still being prepared when it was wanted."""


@dataclass(frozen=True)
class Modelled:
    """Sums over rounds, in seconds."""

    mode: str
    rounds: int
    tokens: int
    """Committed by the rounds."""
    seconds: float
    verify_s: float
    draft_s: float
    """Time in which the target waits for a draft, without switches."""
    switch_s: float
    rest_s: float
    hit_rate: float | None = None
    """Hits / rounds that wanted a successor. Async mode only."""
    late: int = 0
    """Rounds that waited for a successor. Async mode only."""

    @property
    def tpot_s(self) -> float:
        return ratio(self.seconds, self.tokens)

    @property
    def acceptance_length(self) -> float:
        return ratio(self.tokens, self.rounds)


def pipeline(
    works: Iterable[RoundWork],
    switch_s: float,
    rest_s: float = 0.0,
    contention: Contention = APART,
) -> list[ModelledTimes]:
    """Async rounds, one after the other.

    A round begins when a verdict is known. On a hit its block arrives `switch_s` later, or when the
    worker has ended its pass; on a miss the worker drafts first (`fresh_s`), and in a request's
    first round it also reads the prompt (`read_s`). Then the target verifies while the worker
    prepares. With all hits a round takes max(packed_s, verify_s) + switch_s (the formula published
    with D3D); with none, fresh_s more."""
    times: list[ModelledTimes] = []
    now, prepared = 0.0, 0.0
    for work in works:
        start, late = now, False
        if work.hit is not None:
            late = prepared > start and not work.first
            fresh = 0.0 if work.hit else max(work.fresh_s * contention.fresh, work.read_s)
            start = (prepared if late else start) + fresh + switch_s
        verified, prepared = _side_by_side(start, work, contention)
        times.append(ModelledTimes(now, start, verified, verified + rest_s, prepared, late))
        now = verified + rest_s
    return times


def _side_by_side(start: float, work: RoundWork, contention: Contention) -> tuple[float, float]:
    """When verification and preparation end if both begin at `start`. Unless the contention lasts,
    the one that ends first leaves the whole device to the other."""
    verify, prepare = work.verify_s * contention.verify, work.packed_s * contention.draft
    if contention.lasting:
        return start + verify, start + prepare
    if verify <= prepare:
        return start + verify, start + verify + work.packed_s - verify / contention.draft
    return start + prepare + work.verify_s - prepare / contention.verify, start + prepare


def plain(rounds: Sequence[TracedRound], costs: Costs) -> Modelled:
    """The same tokens, one a round."""
    _check(rounds)
    contexts = [
        context + place for record, context, _ in rounds for place in range(record.num_committed)
    ]
    verify = sum(costs.verify(1, context) for context in contexts)
    return _without_overlap("plain", len(contexts), len(contexts), verify, 0.0, costs)


def serial(rounds: Sequence[TracedRound], costs: Costs) -> Modelled:
    """Draft, then verify: a round takes the sum of both."""
    _check(rounds)
    draft = sum(
        _serial_draft(traced, costs)
        for traced in rounds
        if traced.record.draft_length and not traced.record.looked_up
    )
    verify = sum(costs.verify(record.draft_length + 1, context) for record, context, _ in rounds)
    return _without_overlap("serial", len(rounds), _tokens(rounds), verify, draft, costs)


def fused(rounds: Sequence[TracedRound], costs: Costs, rows: int) -> Modelled:
    """One pass a round. The rounds must be fused mode's own, since its drafts are shorter than
    serial mode's. rows: of a pass whose number of slots was not recorded."""
    _check(rounds)
    verify = sum(_fused_pass(traced, costs, rows) for traced in rounds)
    return _without_overlap("fused", len(rounds), _tokens(rounds), verify, 0.0, costs)


def _without_overlap(
    mode: str, rounds: int, tokens: int, verify_s: float, draft_s: float, costs: Costs
) -> Modelled:
    rest_s = costs.rest_s * rounds
    return Modelled(
        mode, rounds, tokens, draft_s + verify_s + rest_s, verify_s, draft_s, 0.0, rest_s
    )


def _serial_draft(traced: TracedRound, costs: Costs) -> float:
    """A drafter with a cache of its own has to read the prompt in serial mode, too."""
    draft = costs.draft(traced.record.draft_length, traced.context)
    reads = traced.first and costs.has_own_cache
    return max(draft, costs.read(traced.context)) if reads else draft


def _fused_pass(traced: TracedRound, costs: Costs, rows: int) -> float:
    num_slots, clean = traced.record.num_slots, 1 + traced.record.draft_length
    if num_slots is None:
        return costs.fused(rows, traced.context)
    if not num_slots:
        return costs.verify(clean, traced.context)
    return costs.fused(clean + num_slots, traced.context)


def asynchronous(
    rounds: Sequence[TracedRound],
    costs: Costs,
    outcomes: int,
    hit_rate_at: Sequence[float],
    contention: Contention = APART,
) -> Modelled:
    """The draft worker prepares `outcomes` successors a round. hit_rate_at[k]: hit rate after
    verdicts that kept k tokens, for rounds whose hits were not recorded."""
    _check(rounds)
    works = _async_work(rounds, costs, outcomes, hit_rate_at)
    times = pipeline(works, costs.switch_s, costs.rest_s, contention)
    wanted = [work.hit for work in works if work.hit is not None and not work.first]
    switch_s = sum(work.hit is not None for work in works) * costs.switch_s
    return Modelled(
        "async",
        len(works),
        _tokens(rounds),
        times[-1].ended,
        verify_s=sum(each.verify_until - each.verify_from for each in times),
        draft_s=sum(each.verify_from - each.started for each in times) - switch_s,
        switch_s=switch_s,
        rest_s=costs.rest_s * len(works),
        hit_rate=ratio(sum(wanted), len(wanted)) if wanted else None,
        late=sum(each.late for each in times),
    )


def _async_work(
    rounds: Sequence[TracedRound], costs: Costs, outcomes: int, hit_rate_at: Sequence[float]
) -> list[RoundWork]:
    """The first round is a request's first, whether or not it says so."""
    firsts = [True, *(traced.first for traced in rounds[1:])]
    before = (traced.record for traced, first in zip(rounds, firsts[1:], strict=False) if not first)
    last = len(hit_rate_at) - 1
    hits = iter(spread(hit_rate_at[min(record.num_accepted, last)] for record in before))
    likely = [not first and next(hits) for first in firsts]
    works = []
    for traced, guess, first in zip(rounds, likely, firsts, strict=True):
        length, context = traced.record.draft_length, traced.context
        hit = guess if traced.hit is None else traced.hit
        works.append(
            RoundWork(
                costs.verify(length + 1, context),
                costs.draft(length, context) if length else 0.0,
                costs.packed(length, outcomes, context) if length else 0.0,
                hit if length else None,
                first,
                costs.read(context) if first else 0.0,
            )
        )
    return works


def spread(chances: Iterable[float]) -> list[bool]:
    """Yes and no in the given shares, spread evenly: always the same, and right to within one."""
    sums = itertools.accumulate(chances, initial=0.0)
    return [int(after + 1e-9) > int(before + 1e-9) for before, after in itertools.pairwise(sums)]


def _tokens(rounds: Sequence[TracedRound]) -> int:
    return sum(traced.record.num_committed for traced in rounds)


def _check(rounds: Sequence[TracedRound]) -> None:
    if not rounds or not _tokens(rounds):
        raise InvalidRequest(
            "trace: it holds no round that committed a token, so there is nothing to model"
        )
