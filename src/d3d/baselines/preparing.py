"""Drafters without a model for async mode: they propose as a scripted `Double` does, and foresee as
much as they are told to."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as ListLike
from dataclasses import dataclass

from d3d.baselines.scripted import Double
from d3d.core.sequence import Sequence
from d3d.core.types import DraftBlock, Outcome, SamplingParams
from d3d.engine.rng import uniform

Expect = Callable[[list[int], ListLike[int]], list[Outcome]]
"""(text, draft under verification behind it) -> outcomes to prepare, the likeliest first."""


def nothing_happens(_number: int) -> None:
    pass


@dataclass(frozen=True)
class PreparingDouble:
    """A `Preparer` made of functions; its sessions are independent of each other."""

    double: Double
    expect: Expect
    before: Callable[[int], None] = nothing_happens
    """Called before each request with its number in the session, to sleep, to raise or to end the
    process."""

    @property
    def block_size(self) -> int:
        return self.double.block_size

    def open(self, capacity: int, outcome_budget: int) -> PreparingDoubleSession:  # noqa: ARG002 - nothing is cached
        return PreparingDoubleSession(self)


class PreparingDoubleSession:
    """Counts the requests; see `PreparingSession`."""

    def __init__(self, double: PreparingDouble) -> None:
        self._double = double
        self._number = 0

    def draft(self, text: list[int], draft_length: int) -> DraftBlock:
        self._count()
        return self._propose(text, draft_length)

    def likely_outcomes(self, text: list[int], draft: ListLike[int], budget: int) -> list[Outcome]:
        return self._double.expect(text, draft)[:budget]

    def prepare(
        self, text: list[int], draft: ListLike[int], outcomes: ListLike[Outcome], draft_length: int
    ) -> dict[Outcome, DraftBlock]:
        self._count()
        return {
            o: self._propose([*text, *draft[: o.num_accepted], o.bonus_token], draft_length)
            for o in outcomes
        }

    def _count(self) -> None:
        self._number += 1
        self._double.before(self._number - 1)

    def _propose(self, text: list[int], draft_length: int) -> DraftBlock:
        wanted = min(draft_length, self._double.block_size)
        return self._double.double.propose(
            Sequence(text, SamplingParams()), wanted, self._number - 1
        )


def foresees(answers: ListLike[ListLike[int]]) -> Expect:
    """Knows the verdict, as long as one of `answers` (prompt and answer together) is what the
    target writes."""
    known = [list(answer) for answer in answers]

    def expect(text: list[int], draft: ListLike[int]) -> list[Outcome]:
        for answer in known:
            if answer[: len(text)] == text:
                coming = answer[len(text) :]
                places = range(min(len(draft), len(coming)))
                num_accepted = next(
                    (place for place in places if draft[place] != coming[place]), len(places)
                )
                return (
                    [Outcome(num_accepted, coming[num_accepted])]
                    if num_accepted < len(coming)
                    else []
                )
        return []

    return expect


def misjudges(expect: Expect, vocab_size: int) -> Expect:
    """Expects another bonus token than would be right: every round misses."""

    def expect_another(text: list[int], draft: ListLike[int]) -> list[Outcome]:
        return [
            Outcome(o.num_accepted, (o.bonus_token + 1) % vocab_size) for o in expect(text, draft)
        ]

    return expect_another


def sometimes(probability: float, seed: int, first: Expect, otherwise: Expect) -> Expect:
    """`first` with `probability`, which hangs on (seed, length of the text) alone."""

    def expect(text: list[int], draft: ListLike[int]) -> list[Outcome]:
        return (first if uniform(seed, len(text)) < probability else otherwise)(text, draft)

    return expect
