"""Estimates from recorded rounds for modes that did not run: hit rates of async mode, rounds of
fused mode."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence

from d3d.engine.metrics import ratio
from d3d.lab.plan.costs import interpolate
from d3d.lab.plan.trace import Recall, Trace, TracedRound, bare_round
from d3d.methods.estimate import Survival
from d3d.methods.fused.config import DEFAULT_FUSED_DRAFT_LENGTH
from d3d.methods.fused.plan import PRIOR_KEPT, PRIOR_ROUNDS, plan_rows


def recall_of(recall: Recall, num_accepted: int, guesses: int) -> float:
    """Share of the rounds that kept num_accepted tokens whose bonus token is among so many guesses.

    Interpolated over the logarithm of the number of guesses, constant beyond the largest."""
    if guesses < 1:
        return 0.0
    known = [
        (math.log2(top), share)
        for top, row in sorted(recall.items())
        if num_accepted < len(row) and (share := row[num_accepted]) is not None
    ]
    if not known:
        return 0.0
    return interpolate(known, min(max(math.log2(guesses), known[0][0]), known[-1][0]))


def split_budget(histogram: Sequence[int], recall: Recall, budget: int) -> list[int]:
    """Guesses for 0, 1, ... kept tokens, given out one at a time to the place that gains most hits.

    One split for all rounds; a real drafter splits by its confidences in each, and does better."""
    guesses = [0] * len(histogram)

    def gain(place: int) -> float:
        now, then = (recall_of(recall, place, guesses[place] + more) for more in (0, 1))
        return histogram[place] * (then - now)

    for _ in range(budget):
        best = max(range(len(guesses)), key=gain)
        if gain(best) <= 0:
            break
        guesses[best] += 1
    return guesses


def hit_rates(trace: Trace, outcomes: int) -> tuple[tuple[float, ...], str] | None:
    """Hit rates after verdicts that kept 0, 1, ... tokens, and their origin; None if unknown."""
    if trace.hit_rate_at is not None:
        return trace.hit_rate_at, "recorded"
    recorded = [
        traced.hit for traced in trace.rounds if traced.hit is not None and not traced.first
    ]
    if recorded:
        return (ratio(sum(recorded), len(recorded)),), "recorded"
    if (hits := trace.hits_by_budget) is not None:
        places = range(trace.draft_length + 1)
        return tuple(recall_of(hits, place, outcomes) for place in places), "replayed"
    if (recall := trace.recall) is None:
        return None
    guesses = split_budget(trace.histogram, recall, outcomes)
    rates = tuple(recall_of(recall, place, count) for place, count in enumerate(guesses))
    return rates, "from recall of the bonus token"


def fused_rounds(trace: Trace, rows: int) -> list[TracedRound]:
    """Fused rounds estimated from serial ones: about as many tokens, with `rows` rows a pass.

    Slot j of a group sees what slot j + 1 of a serial draft sees, but never the bonus token, so it
    is kept at most as often as that drafted token, given that the first one was. The shares are the
    same in every round, so real rounds, which follow the drafter's confidence, do better."""
    chances = _chances(trace)
    rng = random.Random(0)
    rounds: list[TracedRound] = []
    survival = Survival(len(chances), PRIOR_KEPT, PRIOR_ROUNDS)
    size, left = 0, sum(record.num_committed for record in trace.records)
    context = trace.rounds[0].context
    while left > 0:
        plan = plan_rows(chances[:size], survival.shares, rows, left + rows)
        kept = 0
        while kept < plan.num_drafted and rng.random() < chances[kept]:
            kept += 1
        survival.add(plan.num_drafted, kept)
        committed = min(kept + 1, left)
        record = bare_round(plan.num_drafted, kept, committed, num_slots=sum(plan.groups))
        rounds.append(TracedRound(record, context))
        size, left, context = plan.groups[kept], left - committed, context + committed
    return rounds


def _chances(trace: Trace) -> list[float]:
    """Share of the rounds that kept the first j + 1 tokens in which token j + 2 was kept too, for
    as many tokens as fused mode drafts."""
    histogram = trace.histogram
    reached = [sum(histogram[place:]) for place in range(1, len(histogram))]
    chances = [ratio(after, before) for before, after in itertools.pairwise(reached)]
    return chances[:DEFAULT_FUSED_DRAFT_LENGTH] or [0.0]
