"""Counts over replayed rounds: acceptance, recall of the bonus token, hits of prepared outcomes.
Their rates and means come from `d3d.engine.metrics`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from d3d.engine.metrics import acceptance_at, ratio

RECALL_TOPS = (1, 4, 16)
"""Numbers of guesses for which recall of the bonus token is reported."""

BUDGETS = (1, 2, 4, 8, 16, 32, 64)
"""Outcome budgets for which hits are counted."""


@dataclass
class HitCounts:
    """Rounds whose verdict was foreseen with n guesses, for several n, by num_accepted."""

    draft_length: int
    sizes: tuple[int, ...] = BUDGETS
    """Numbers of guesses."""
    wanted: list[int] = field(default_factory=list)
    """Rounds that count, by num_accepted, 0..draft_length."""
    hits: dict[int, list[int]] = field(default_factory=dict)
    """Those of them that were foreseen, by size, then as `wanted`."""

    def __post_init__(self) -> None:
        self.wanted = self.wanted or [0] * (self.draft_length + 1)
        self.hits = self.hits or {size: [0] * len(self.wanted) for size in self.sizes}

    def add_round(self, num_accepted: int, is_hit: Callable[[int], bool]) -> None:
        """is_hit: whether the verdict was foreseen, by size."""
        self.wanted[num_accepted] += 1
        for size, hits in self.hits.items():
            hits[num_accepted] += is_hit(size)

    def add(self, other: HitCounts) -> None:
        """Add counts of the same draft length and sizes."""
        self.wanted = _sums(self.wanted, other.wanted)
        self.hits = {size: _sums(hits, other.hits[size]) for size, hits in self.hits.items()}

    @property
    def hit_rate(self) -> dict[int, float | None]:
        """By size; None if there was no round."""
        return {size: _share(sum(hits), sum(self.wanted)) for size, hits in self.hits.items()}

    @property
    def hit_rate_at(self) -> dict[int, list[float | None]]:
        """By size, then by num_accepted."""
        return {
            size: [_share(hit, of) for hit, of in zip(hits, self.wanted, strict=True)]
            for size, hits in self.hits.items()
        }

    def to_dict(self) -> dict[str, Any]:
        return {
            "rounds_wanting": self.wanted,
            "hit_rate": {str(size): rate for size, rate in self.hit_rate.items()},
            "hit_rate_at": {str(size): rates for size, rates in self.hit_rate_at.items()},
        }


@dataclass
class RoundCounts:
    """Acceptance of rounds at one draft length."""

    draft_length: int
    committed: int = 0
    """Tokens committed by rounds."""
    histogram: list[int] = field(default_factory=list)
    """Rounds by num_accepted, 0..draft_length."""
    answers: int = 0
    """Answers that had a round."""
    length_sum: float = 0.0
    """Sum of these answers' own acceptance lengths."""
    bonus: HitCounts = field(init=False)
    """Rounds whose bonus token was among the drafter's first 1, 4, 16 guesses. Those at full length
    do not count if the block has no slot for that guess."""

    def __post_init__(self) -> None:
        self.histogram = self.histogram or [0] * (self.draft_length + 1)
        self.bonus = HitCounts(self.draft_length, RECALL_TOPS)

    def add_round(self, num_accepted: int, num_committed: int) -> None:
        self.committed += num_committed
        self.histogram[num_accepted] += 1

    def add_bonus(self, num_accepted: int, rank: int) -> None:
        """rank: number of other tokens that the drafter held likelier than the bonus token, the
        rejected one left out."""
        self.bonus.add_round(num_accepted, lambda size: rank < size)

    def add_answer(self, answer: RoundCounts) -> None:
        """Add the rounds of one answer."""
        self.add(answer)
        if answer.rounds:
            self.answers += 1
            self.length_sum += answer.acceptance_length

    def add(self, other: RoundCounts) -> None:
        """Add counts of other answers. Raises ValueError for another draft length."""
        if other.draft_length != self.draft_length:
            raise ValueError(
                f"rounds of draft lengths {self.draft_length} and {other.draft_length} don't add up"
            )
        self.committed += other.committed
        self.answers += other.answers
        self.length_sum += other.length_sum
        self.histogram = _sums(self.histogram, other.histogram)
        self.bonus.add(other.bonus)

    @property
    def rounds(self) -> int:
        return sum(self.histogram)

    @property
    def acceptance_length(self) -> float:
        """Tokens committed by rounds / rounds, over all answers."""
        return ratio(self.committed, self.rounds)

    @property
    def acceptance_length_macro(self) -> float:
        """Mean of the answers' own acceptance lengths, as in papers; short answers weigh as much as
        long ones."""
        return ratio(self.length_sum, self.answers)

    @property
    def acceptance_at(self) -> list[float]:
        """Share of rounds in which drafted token 1, 2, ... was kept."""
        return list(acceptance_at(self.histogram))

    @property
    def bonus_recall(self) -> dict[int, list[float | None]]:
        """By number of guesses (1, 4, 16), then by num_accepted."""
        return self.bonus.hit_rate_at


def total(draft_length: int, parts: Iterable[RoundCounts]) -> RoundCounts:
    """The sum of several counts."""
    whole = RoundCounts(draft_length)
    for part in parts:
        whole.add(part)
    return whole


def total_hits(parts: Iterable[HitCounts]) -> HitCounts:
    """The sum of several counts. Raises ValueError if there are none, or if their draft lengths or
    sizes differ."""
    parts = list(parts)
    shapes = {(part.draft_length, part.sizes) for part in parts}
    if len(shapes) != 1:
        raise ValueError(f"hits of {len(shapes)} draft lengths and budgets don't add up")
    whole = HitCounts(*shapes.pop())
    for part in parts:
        whole.add(part)
    return whole


def _sums(first: list[int], second: list[int]) -> list[int]:
    return [a + b for a, b in zip(first, second, strict=True)]


def _share(part: int, whole: int) -> float | None:
    return ratio(part, whole) if whole else None
