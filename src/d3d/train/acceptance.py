"""Counts over rounds: acceptance length, acceptance at each position, and how often the bonus token
was among the drafter's guesses."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

RECALL_TOPS = (1, 4, 16)
"""Numbers of guesses for which recall of the bonus token is told."""


@dataclass
class Acceptance:
    """Counts over rounds; adding is how several answers come together."""

    draft_length: int
    rounds: int = 0
    committed: int = 0
    histogram: list[int] = field(default_factory=list)
    """Rounds by num_accepted, 0..draft_length."""
    answers: int = 0
    """Answers that had a round."""
    length_sum: float = 0.0
    """Sum of these answers' own acceptance lengths."""
    bonus_rounds: list[int] = field(default_factory=list)
    """Rounds in which the bonus token's rank among the drafter's guesses is known, by
    num_accepted."""
    bonus_hits: dict[int, list[int]] = field(default_factory=dict)
    """Those of them in which it was among the first 1, 4, 16, by num_accepted."""

    def __post_init__(self) -> None:
        places = self.draft_length + 1
        self.histogram = self.histogram or [0] * places
        self.bonus_rounds = self.bonus_rounds or [0] * places
        self.bonus_hits = self.bonus_hits or {top: [0] * places for top in RECALL_TOPS}

    def add_round(self, num_accepted: int, num_committed: int) -> None:
        self.rounds += 1
        self.committed += num_committed
        self.histogram[num_accepted] += 1

    def add_bonus(self, num_accepted: int, rank: int) -> None:
        """rank: how many tokens the drafter held for likelier than the bonus token, those that it
        can't be left out."""
        self.bonus_rounds[num_accepted] += 1
        for top, hits in self.bonus_hits.items():
            hits[num_accepted] += rank < top

    def add_answer(self, other: Acceptance) -> None:
        """Add the rounds of one answer, counted by themselves."""
        self._add(other)
        if other.rounds:
            self.answers += 1
            self.length_sum += other.acceptance_length

    def __iadd__(self, other: Acceptance) -> Acceptance:
        """Add those of other answers, drafted at the same draft length."""
        self._add(other)
        self.answers += other.answers
        self.length_sum += other.length_sum
        return self

    def _add(self, other: Acceptance) -> None:
        if other.draft_length != self.draft_length:
            raise ValueError(
                f"rounds of draft lengths {self.draft_length} and {other.draft_length} don't add up"
            )
        self.rounds += other.rounds
        self.committed += other.committed
        self.histogram = _sums(self.histogram, other.histogram)
        self.bonus_rounds = _sums(self.bonus_rounds, other.bonus_rounds)
        self.bonus_hits = {
            top: _sums(hits, other.bonus_hits[top]) for top, hits in self.bonus_hits.items()
        }

    @property
    def acceptance_length(self) -> float:
        """Tokens committed by rounds over rounds: what decoding all answers costs."""
        return self.committed / self.rounds if self.rounds else 0.0

    @property
    def acceptance_length_macro(self) -> float:
        """Mean of the answers' own acceptance lengths, as papers have it; short answers weigh as
        much as long ones."""
        return self.length_sum / self.answers if self.answers else 0.0

    @property
    def acceptance_at(self) -> list[float]:
        """Share of rounds in which drafted token 1, 2, ... was kept."""
        return [
            sum(self.histogram[j:]) / self.rounds if self.rounds else 0.0
            for j in range(1, self.draft_length + 1)
        ]

    @property
    def bonus_recall(self) -> dict[int, list[float | None]]:
        """By number of guesses (1, 4, 16): share of the rounds that kept 0, 1, ..., draft_length
        tokens in which the bonus token was among them. None where there was no such round, and at
        full length where the block has no room for a guess."""
        return {
            top: [
                hit / rounds if rounds else None
                for hit, rounds in zip(hits, self.bonus_rounds, strict=True)
            ]
            for top, hits in self.bonus_hits.items()
        }


def total(draft_length: int, parts: Iterable[Acceptance]) -> Acceptance:
    """All of them together."""
    whole = Acceptance(draft_length)
    for part in parts:
        whole += part
    return whole


def _sums(a: Sequence[int], b: Sequence[int]) -> list[int]:
    return [x + y for x, y in zip(a, b, strict=True)]
