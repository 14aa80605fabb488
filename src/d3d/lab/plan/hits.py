"""How often a successor is among those prepared: from how often the bonus token is among the
drafter's guesses."""

from __future__ import annotations

import math
from collections.abc import Sequence

from d3d.lab.plan.costs import interpolate
from d3d.lab.plan.trace import Recall, Trace


def recall_of(recall: Recall, num_accepted: int, guesses: int) -> float:
    """Share of the rounds that kept so many tokens in which the bonus token is among so many
    guesses. Between the numbers of guesses that were measured it is interpolated over their
    logarithm; beyond the largest it stays."""
    if guesses < 1:
        return 0.0
    known = [
        (math.log2(top), share)
        for top, row in sorted(recall.items())
        if (share := _share(row, num_accepted)) is not None
    ]
    if not known:
        return 0.0
    return interpolate(known, min(max(math.log2(guesses), known[0][0]), known[-1][0]))


def _share(row: Sequence[float | None], num_accepted: int) -> float | None:
    return row[num_accepted] if num_accepted < len(row) else None


def split_budget(histogram: Sequence[int], recall: Recall, budget: int) -> list[int]:
    """Guesses for 0, 1, ... kept tokens: one after the other where it adds most hits. One split for
    all rounds; the program makes one for each, from the drafter's confidences, so it will do rather
    better."""
    guesses = [0] * len(histogram)
    for _ in range(budget):
        gains = [
            count
            * (
                recall_of(recall, place, guesses[place] + 1)
                - recall_of(recall, place, guesses[place])
            )
            for place, count in enumerate(histogram)
        ]
        best = max(range(len(gains)), key=gains.__getitem__)
        if gains[best] <= 0:
            break
        guesses[best] += 1
    return guesses


def hit_rates(trace: Trace, outcomes: int) -> tuple[tuple[float, ...], str] | None:
    """Shares of hits behind verdicts that kept 0, 1, ... tokens, and where they come from; None
    where the trace does not tell."""
    if trace.hit_rate_at is not None:
        return trace.hit_rate_at, "recorded"
    told = [one.hit for one in trace.rounds if one.hit is not None and not one.first]
    if told:
        return (sum(told) / len(told),), "recorded"
    if trace.hits_by_budget is not None:
        return tuple(
            recall_of(trace.hits_by_budget, kept, outcomes)
            for kept in range(trace.draft_length + 1)
        ), "replayed"
    if trace.recall is None:
        return None
    guesses = split_budget(trace.histogram, trace.recall, outcomes)
    return tuple(
        recall_of(trace.recall, place, count) for place, count in enumerate(guesses)
    ), "from recall of the bonus token"
