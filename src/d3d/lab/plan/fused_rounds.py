"""Fused mode's rounds, guessed from serial mode's: a group of slots is a serial draft without its
first token."""

from __future__ import annotations

import itertools
import random

from d3d.lab.plan.trace import Trace, TracedRound
from d3d.methods.estimate import Survival
from d3d.methods.fused.config import DEFAULT_FUSED_DRAFT_LENGTH
from d3d.methods.fused.plan import plan_rows


def fused_rounds(trace: Trace, rows: int) -> list[TracedRound]:
    """Rounds that commit about as many tokens as the trace's, with `rows` rows a pass.

    Slot j of a group sees what slot j + 1 of a serial draft sees, its anchor included, but never
    the bonus token; so it is kept at most as often as that drafted token is, given that the first
    one was. An estimate from shares alone, the same at every round: where the drafter is now surer,
    now less, the program does better."""
    chances = _chances(trace)
    rng = random.Random(0)
    rounds: list[TracedRound] = []
    survival = Survival(len(chances))
    size, left = 0, sum(one.num_committed for one in trace.rounds)
    context = trace.rounds[0].context
    while left > 0:
        plan = plan_rows(chances[:size], survival.shares, rows, left + rows)
        kept = 0
        while kept < plan.num_drafted and rng.random() < chances[kept]:
            kept += 1
        survival.add(plan.num_drafted, kept)
        committed = min(kept + 1, left)
        rounds.append(
            TracedRound(plan.num_drafted, kept, committed, context, num_slots=sum(plan.groups))
        )
        size, left, context = plan.groups[kept], left - committed, context + committed
    return rounds


def _chances(trace: Trace) -> list[float]:
    """Share of the rounds that kept the first j + 1 tokens in which token j + 2 was kept too, for
    as many tokens as fused mode drafts."""
    histogram = trace.histogram
    reached = [sum(histogram[place:]) for place in range(1, len(histogram))]
    chances = [after / before if before else 0.0 for before, after in itertools.pairwise(reached)]
    return chances[:DEFAULT_FUSED_DRAFT_LENGTH] or [0.0]
