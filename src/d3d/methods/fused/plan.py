"""Row plans of a fused pass: drafted tokens to verify, and after each row slots in case it is the
last one kept. Works on probabilities and a row budget, without tensors."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from operator import mul
from typing import NamedTuple

PRIOR_KEPT = 0.65
"""Prior acceptance probability of a slot-drafted token, given that those before it are kept."""

PRIOR_ROUNDS = 4
"""Weight of the prior, in rounds."""

NEXT_ROUND = 0.6
"""Value of a token of the next round's draft, relative to one of this round: it may get no row
there (docs/log.md)."""


class RowPlan(NamedTuple):
    """Rows of one request's pass, beside the anchor."""

    num_drafted: int
    """Drafted tokens to verify."""
    groups: tuple[int, ...]
    """Tokens to draft after the anchor and after each drafted token, [num_drafted + 1]."""


NO_SLOTS = RowPlan(0, ())


def plan_rows(
    confidences: Sequence[float],
    survival: Sequence[float],
    rows: int,
    remaining: int,
    price: float = 0.0,
) -> RowPlan:
    """Choose the rows that promise most tokens, kept in this round and drafted for the next, less
    their cost.

    confidences: probability of each offered token given that those before it are kept; survival[j]:
    probability that the first j + 1 tokens of the next draft are kept; rows: maximum rows of the
    pass, the anchor's included; remaining: tokens that may still be committed; price: tokens that
    the time of a row is worth."""
    reached = [1.0, *accumulate(confidences, mul)]
    best, promised = RowPlan(0, (0,)), -1.0
    for num_drafted in range(min(len(confidences), rows - 1, remaining) + 1):
        stops = [reached[i] * (1 - confidences[i]) for i in range(num_drafted)]
        stops.append(reached[num_drafted])
        gains = (
            (NEXT_ROUND * stop * share - price, group)
            for group, stop in enumerate(stops)
            for share in survival[: max(0, min(rows, remaining - group - 1))]
        )
        worth = sorted((gain for gain in gains if gain[0] > 0), reverse=True)
        worth = worth[: rows - 1 - num_drafted]
        tokens = sum(reached[1 : num_drafted + 1]) - price * num_drafted
        tokens += sum(gain for gain, _ in worth)
        if tokens > promised:
            groups = [0] * (num_drafted + 1)
            for _, group in worth:
                groups[group] += 1
            best, promised = RowPlan(num_drafted, tuple(groups)), tokens
    return best
