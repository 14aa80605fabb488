"""Which rows a fused pass gets: drafted tokens to verify, and behind each row slots for the case
that it is the last one kept.

It knows probabilities and a number of rows, no tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul
from typing import NamedTuple

FIRST_GUESS = 0.65
"""Share of drafted tokens that is taken to be kept, given that those before it are, until rounds
have shown it."""

GUESS_ROUNDS = 4
"""How many rounds that guess counts for."""


NEXT_ROUND = 0.6
"""What a token of the next round's draft is worth, where one of this round is worth 1: it may not
get a row there (docs/log.md)."""


class FusedPlan(NamedTuple):
    """Rows of one sequence's pass, the anchor's own not counted."""

    num_drafted: int
    """Drafted tokens to verify."""
    groups: tuple[int, ...]
    """Tokens to draft behind the anchor and behind each drafted token, [num_drafted + 1]."""


@dataclass
class Survival:
    """How often the first 1, 2, ... tokens of a draft are kept, as far as this request has
    shown."""

    draft_length: int
    _drafted: list[float] = field(default_factory=list)
    _kept: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._drafted = [float(GUESS_ROUNDS)] * self.draft_length
        self._kept = [
            GUESS_ROUNDS * FIRST_GUESS ** (depth + 1) for depth in range(self.draft_length)
        ]

    def add(self, num_drafted: int, num_accepted: int) -> None:
        for depth in range(num_drafted):
            self._drafted[depth] += 1
            self._kept[depth] += depth < num_accepted

    @property
    def shares(self) -> list[float]:
        """[draft_length], falling."""
        return list(
            accumulate(
                (kept / drafted for kept, drafted in zip(self._kept, self._drafted, strict=True)),
                min,
            )
        )


def plan_rows(
    confidences: Sequence[float],
    survival: Sequence[float],
    rows: int,
    remaining: int,
    price: float = 0.0,
) -> FusedPlan:
    """The rows that promise most tokens, kept in this round and drafted for the next, less what
    they cost.

    confidences: probability of each drafted token on offer, given that those before it are kept;
    survival[j]: probability that the first j + 1 tokens of the next draft are kept; rows: all that
    the pass may have, the anchor's included; remaining: tokens that the draft and what follows it
    may still come to; price: tokens that the time of a row is worth."""
    reached = [1.0, *accumulate(confidences, mul)]
    best, promised = FusedPlan(0, (0,)), -1.0
    for num_drafted in range(min(len(confidences), rows - 1, remaining) + 1):
        stops = [reached[i] * (1 - confidences[i]) for i in range(num_drafted)] + [
            reached[num_drafted]
        ]
        gains = (
            (NEXT_ROUND * stop * share - price, group)
            for group, stop in enumerate(stops)
            for share in survival[: max(0, min(rows, remaining - group - 1))]
        )
        worth = sorted((gain for gain in gains if gain[0] > 0), reverse=True)[
            : rows - 1 - num_drafted
        ]
        tokens = (
            sum(reached[1 : num_drafted + 1]) - price * num_drafted + sum(gain for gain, _ in worth)
        )
        if tokens > promised:
            groups = [0] * (num_drafted + 1)
            for _, group in worth:
                groups[group] += 1
            best, promised = FusedPlan(num_drafted, tuple(groups)), tokens
    return best
