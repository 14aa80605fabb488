"""Counts over replayed rounds: acceptance, recall of the bonus token, hits of prepared outcomes.
Their rates and means come from `d3d.engine.metrics`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from d3d.core.types import Outcome
from d3d.drafting.outcomes import within_budget
from d3d.engine.metrics import acceptance_at, ratio

RECALL_TOPS = (1, 4, 16)
"""Numbers of guesses for which recall of the bonus token is reported."""

BUDGETS = (1, 2, 4, 8, 16, 32, 64)
"""Outcome budgets for which hits are counted."""


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
    bonus_rounds: list[int] = field(default_factory=list)
    """Rounds whose bonus token has a known rank among the drafter's guesses, by num_accepted."""
    bonus_hits: dict[int, list[int]] = field(default_factory=dict)
    """Those whose bonus token was among the first 1, 4, 16 guesses, by num_accepted."""

    def __post_init__(self) -> None:
        zeros = [0] * (self.draft_length + 1)
        self.histogram = self.histogram or list(zeros)
        self.bonus_rounds = self.bonus_rounds or list(zeros)
        self.bonus_hits = self.bonus_hits or {top: list(zeros) for top in RECALL_TOPS}

    def add_round(self, num_accepted: int, num_committed: int) -> None:
        self.committed += num_committed
        self.histogram[num_accepted] += 1

    def add_bonus(self, num_accepted: int, rank: int) -> None:
        """rank: number of other tokens that the drafter held likelier than the bonus token, the
        rejected one left out."""
        self.bonus_rounds[num_accepted] += 1
        for top, hits in self.bonus_hits.items():
            hits[num_accepted] += rank < top

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
        self.bonus_rounds = _sums(self.bonus_rounds, other.bonus_rounds)
        self.bonus_hits = _sums_by_key(self.bonus_hits, other.bonus_hits)

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
        """By number of guesses (1, 4, 16), then by num_accepted: share of rounds whose bonus token
        was among them. None if there was no such round, and at full length if the block has no slot
        for that guess."""
        return {top: _shares(hits, self.bonus_rounds) for top, hits in self.bonus_hits.items()}


def total(draft_length: int, parts: Iterable[RoundCounts]) -> RoundCounts:
    """The sum of several counts."""
    whole = RoundCounts(draft_length)
    for part in parts:
        whole.add(part)
    return whole


@dataclass
class HitCounts:
    """Hits over the rounds that wanted a successor, that is, those that another round followed."""

    draft_length: int
    budgets: tuple[int, ...] = BUDGETS
    wanted: list[int] = field(default_factory=list)
    """Rounds that wanted a successor, by the verdict's num_accepted, 0..draft_length."""
    hits: dict[int, list[int]] = field(default_factory=dict)
    """Those whose verdict was among the outcomes, by budget, then as `wanted`."""

    def __post_init__(self) -> None:
        zeros = [0] * (self.draft_length + 1)
        self.wanted = self.wanted or list(zeros)
        self.hits = self.hits or {budget: list(zeros) for budget in self.budgets}

    def add(self, outcomes: Sequence[Outcome], verdict: Outcome, drafted: int) -> None:
        """outcomes: listed for the largest budget, for a draft of `drafted` tokens."""
        self.wanted[verdict.num_accepted] += 1
        for budget, hits in self.hits.items():
            hits[verdict.num_accepted] += verdict in within_budget(outcomes, budget, drafted)

    @property
    def hit_rate(self) -> dict[int, float | None]:
        """By budget; None if no round wanted a successor."""
        return {budget: _share(sum(hits), sum(self.wanted)) for budget, hits in self.hits.items()}

    @property
    def hit_rate_at(self) -> dict[int, list[float | None]]:
        """By budget, then by num_accepted."""
        return {budget: _shares(hits, self.wanted) for budget, hits in self.hits.items()}

    def to_dict(self) -> dict[str, Any]:
        return {
            "rounds_wanting": self.wanted,
            "hit_rate": {str(budget): rate for budget, rate in self.hit_rate.items()},
            "hit_rate_at": {str(budget): rates for budget, rates in self.hit_rate_at.items()},
        }


def total_hits(parts: Iterable[HitCounts]) -> HitCounts:
    """The sum of several counts. Raises ValueError if there are none, or if their draft lengths or
    budgets differ."""
    parts = list(parts)
    shapes = {(part.draft_length, part.budgets) for part in parts}
    if len(shapes) != 1:
        raise ValueError(f"hits of {len(shapes)} draft lengths and budgets don't add up")
    whole = HitCounts(*shapes.pop())
    for part in parts:
        whole.wanted = _sums(whole.wanted, part.wanted)
        whole.hits = _sums_by_key(whole.hits, part.hits)
    return whole


def _sums(first: Sequence[int], second: Sequence[int]) -> list[int]:
    return [a + b for a, b in zip(first, second, strict=True)]


def _sums_by_key(first: dict[int, list[int]], second: dict[int, list[int]]) -> dict[int, list[int]]:
    return {key: _sums(counts, second[key]) for key, counts in first.items()}


def _share(part: int, whole: int) -> float | None:
    return ratio(part, whole) if whole else None


def _shares(parts: Sequence[int], wholes: Sequence[int]) -> list[float | None]:
    return [_share(part, whole) for part, whole in zip(parts, wholes, strict=True)]
