"""A model of rounds: when does what run, if passes take so long and verdicts fall so?

It is a simulation of events on two sides, the target and the draft worker, by the rules of
`d3d.methods.async_.coordinator` with the miss policy `draft_now`. It computes no token and measures
nothing; everything that comes out of it is modelled."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from d3d.errors import InvalidRequest
from d3d.lab.plan.costs import APART, Contention, Costs
from d3d.lab.plan.trace import TracedRound


class Work(NamedTuple):
    """What a round asks of both sides, in seconds, each alone on its device."""

    verify_s: float
    fresh_s: float
    """A draft behind the true prefix: what a miss costs, and each round of serial mode."""
    packed_s: float
    """Preparing the successors of this round's block."""
    hit: bool | None
    """Whether this round's block is among the successors prepared in the round before; None where
    it wants none."""
    first: bool = False
    """Whether a request begins with it."""
    read_s: float = 0.0
    """Of a first round: a draft for which the worker reads the prompt, as it takes in async mode;
    0: its draft is like any other."""


class Done(NamedTuple):
    """When a round's parts ran, in seconds from the first round on."""

    started: float
    verify_from: float
    verify_until: float
    ended: float
    prepared_until: float
    late: bool
    """Its successors were still being prepared when they were wanted."""


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
    """Time in which the target waits for a draft; switches not counted."""
    switch_s: float
    rest_s: float
    hit_rate: float | None = None
    """Hits / rounds that wanted a successor. Async mode only, as what follows."""
    late: int = 0

    @property
    def tpot_s(self) -> float:
        return self.seconds / self.tokens

    @property
    def tokens_a_round(self) -> float:
        return self.tokens / self.rounds


def pipeline(
    works: Iterable[Work], switch_s: float, rest_s: float = 0.0, contention: Contention = APART
) -> list[Done]:
    """Async rounds, one after the other.

    A round begins with a verdict known. Its block is there after `switch_s` on a hit, when the
    worker has ended its pass; on a miss the worker drafts first (`fresh_s`), and in a request's
    first round it reads the prompt besides (`read_s`). Then the target verifies while the worker
    prepares. With all hits a round takes max(packed_s, verify_s) + switch_s (the formula published
    with D3D), with none fresh_s more."""
    done: list[Done] = []
    now, prepared = 0.0, 0.0
    for work in works:
        start, late = now, False
        if work.hit is not None:
            late = prepared > start and not work.first
            fresh = 0.0 if work.hit else max(work.fresh_s * contention.fresh, work.read_s)
            start = (prepared if late else start) + fresh + switch_s
        verified, prepared = _side_by_side(start, work, contention)
        done.append(Done(now, start, verified, verified + rest_s, prepared, late))
        now = verified + rest_s
    return done


def _side_by_side(start: float, work: Work, contention: Contention) -> tuple[float, float]:
    """When verification and preparation end, both begun at `start`; the one that ends first leaves
    the other the whole device, unless the contention lasts."""
    verify, prepare = work.verify_s * contention.verify, work.packed_s * contention.draft
    if contention.lasting:
        return start + verify, start + prepare
    if verify <= prepare:
        return start + verify, start + verify + work.packed_s - verify / contention.draft
    return start + prepare + work.verify_s - prepare / contention.verify, start + prepare


def modelled_async(
    works: Sequence[Work], tokens: int, costs_s: tuple[float, float], contention: Contention = APART
) -> Modelled:
    """`costs_s`: seconds of a switch, and of the rest of each round."""
    switch_s, rest_s = costs_s
    done = pipeline(works, switch_s, rest_s, contention)
    wanted = [
        work.hit for work in works if work.hit is not None and not work.first
    ]  # a first round has nothing to find
    switches = sum(work.hit is not None for work in works) * switch_s
    return Modelled(
        "async",
        len(works),
        tokens,
        done[-1].ended,
        verify_s=sum(one.verify_until - one.verify_from for one in done),
        draft_s=sum(one.verify_from - one.started for one in done) - switches,
        switch_s=switches,
        rest_s=rest_s * len(works),
        hit_rate=sum(wanted) / len(wanted) if wanted else None,
        late=sum(one.late for one in done),
    )


def plain(rounds: Sequence[TracedRound], costs: Costs) -> Modelled:
    """The same tokens, one a round."""
    _check(rounds)
    contexts = [one.context + place for one in rounds for place in range(one.num_committed)]
    verify = sum(costs.verify(1, context) for context in contexts)
    rest = costs.rest_s * len(contexts)
    return Modelled("plain", len(contexts), len(contexts), verify + rest, verify, 0.0, 0.0, rest)


def serial(rounds: Sequence[TracedRound], costs: Costs) -> Modelled:
    """Draft, then verify: a round takes the sum of both."""
    _check(rounds)
    draft = sum(
        _serial_draft(one, costs) for one in rounds if one.draft_length and not one.looked_up
    )
    verify = sum(costs.verify(one.draft_length + 1, one.context) for one in rounds)
    rest = costs.rest_s * len(rounds)
    return Modelled(
        "serial", len(rounds), _tokens(rounds), draft + verify + rest, verify, draft, 0.0, rest
    )


def fused(rounds: Sequence[TracedRound], costs: Costs, rows: int) -> Modelled:
    """One pass a round, of the rows that it had, or of `rows` where that was not recorded. The
    rounds must be fused mode's own: its drafts are shorter than serial mode's."""
    _check(rounds)
    verify = sum(_fused_pass(one, costs, rows) for one in rounds)
    rest = costs.rest_s * len(rounds)
    return Modelled("fused", len(rounds), _tokens(rounds), verify + rest, verify, 0.0, 0.0, rest)


def _serial_draft(one: TracedRound, costs: Costs) -> float:
    """A drafter with a cache of its own has the prompt to read in serial mode, too."""
    draft = costs.draft(one.draft_length, one.context)
    return max(draft, costs.read(one.context)) if one.first and costs.has_own_cache else draft


def _fused_pass(one: TracedRound, costs: Costs, rows: int) -> float:
    if one.num_slots is None:
        return costs.fused(rows, one.context)
    clean = 1 + one.draft_length
    return (
        costs.fused(clean + one.num_slots, one.context)
        if one.num_slots
        else costs.verify(clean, one.context)
    )


def asynchronous(
    rounds: Sequence[TracedRound],
    costs: Costs,
    outcomes: int,
    hit_rate_at: Sequence[float],
    contention: Contention = APART,
) -> Modelled:
    """The draft worker prepares `outcomes` successors a round. hit_rate_at[k]: share of the rounds
    behind a verdict that kept k tokens whose block was among them; used where the rounds do not say
    it themselves."""
    _check(rounds)
    works = async_work(rounds, costs, outcomes, hit_rate_at)
    return modelled_async(works, _tokens(rounds), (costs.switch_s, costs.rest_s), contention)


def async_work(
    rounds: Sequence[TracedRound], costs: Costs, outcomes: int, hit_rate_at: Sequence[float]
) -> list[Work]:
    """The first of `rounds` is taken for a request's first whether or not it is told so."""
    firsts = [True, *(one.first for one in rounds[1:])]
    found = (before for before, first in zip(rounds, firsts[1:], strict=False) if not first)
    hits = iter(spread(hit_rate_at[min(one.num_accepted, len(hit_rate_at) - 1)] for one in found))
    likely = [not first and next(hits) for first in firsts]
    return [
        Work(
            costs.verify(one.draft_length + 1, one.context),
            costs.draft(one.draft_length, one.context) if one.draft_length else 0.0,
            costs.packed(one.draft_length, outcomes, one.context) if one.draft_length else 0.0,
            (hit if one.hit is None else one.hit) if one.draft_length else None,
            first,
            costs.read(one.context) if first else 0.0,
        )
        for one, hit, first in zip(rounds, likely, firsts, strict=True)
    ]


def spread(chances: Iterable[float]) -> list[bool]:
    """Yes and no in the given shares, spread as evenly as can be: the same every time, and right to
    one in all."""
    sums = itertools.accumulate(chances, initial=0.0)
    return [int(after + 1e-9) > int(before + 1e-9) for before, after in itertools.pairwise(sums)]


def _tokens(rounds: Sequence[TracedRound]) -> int:
    return sum(one.num_committed for one in rounds)


def _check(rounds: Sequence[TracedRound]) -> None:
    if not rounds or not _tokens(rounds):
        raise InvalidRequest(
            "trace: it holds no round that committed a token, so there is nothing to model"
        )
