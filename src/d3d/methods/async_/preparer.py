"""What a draft worker asks of a drafter: it needs nothing of the target, so it can draft while the
target verifies."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

from d3d.engine.drafter import Draft
from d3d.methods.async_.outcomes import Outcome

SuccessorDrafts = dict[Outcome, Draft]
"""What to draft next, by outcome."""


class PreparingSession(ABC):
    """A preparer's state of one sequence. `text` is the sequence's committed tokens, and only ever
    grows."""

    @abstractmethod
    def draft(self, text: list[int], draft_length: int) -> Draft:
        """At most `draft_length` tokens to follow `text`."""

    @abstractmethod
    def likely_outcomes(self, text: list[int], draft: Sequence[int], budget: int) -> list[Outcome]:
        """At most `budget` verdicts to expect on `draft` behind `text`, the likeliest first."""

    @abstractmethod
    def prepare(
        self, text: list[int], draft: Sequence[int], outcomes: Sequence[Outcome], draft_length: int
    ) -> SuccessorDrafts:
        """The successor of each outcome, or of fewer."""


class DraftTask(NamedTuple):
    """Arguments of `PreparingSession.draft`, and whose."""

    session: Any
    text: list[int]
    draft_length: int


class PrepareTask(NamedTuple):
    """Arguments of `PreparingSession.prepare`, and whose."""

    session: Any
    text: list[int]
    draft: Sequence[int]
    outcomes: Sequence[Outcome]
    draft_length: int


class Preparer(ABC):
    """Makes sessions, and works for several of them at a time.

    The answers of the joint methods are those of the sessions alone; each session may have one task
    at a time."""

    most_together: int = 1
    """Tasks that share a pass."""

    @abstractmethod
    def open(self, outcome_budget: int) -> PreparingSession:
        """For passes of up to `outcome_budget` outcomes."""

    def draft_together(self, tasks: Sequence[DraftTask]) -> list[Draft]:
        return [task.session.draft(task.text, task.draft_length) for task in tasks]

    def prepare_together(self, tasks: Sequence[PrepareTask]) -> list[SuccessorDrafts]:
        return [
            task.session.prepare(task.text, task.draft, task.outcomes, task.draft_length)
            for task in tasks
        ]
