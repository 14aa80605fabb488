"""The interface of a drafter that a draft worker runs. It needs nothing from the target, so it can
draft while the target verifies."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

from d3d.engine.drafter import Draft
from d3d.methods.async_.outcomes import Outcome

SuccessorDrafts = dict[Outcome, Draft]
"""The next draft, by outcome."""


class PreparingSession(ABC):
    """A preparer's state of one sequence. `text` is the sequence's committed tokens; it only
    grows."""

    @abstractmethod
    def draft(self, text: list[int], draft_length: int) -> Draft:
        """At most `draft_length` tokens to follow `text`."""

    @abstractmethod
    def likely_outcomes(self, text: list[int], draft: Sequence[int], budget: int) -> list[Outcome]:
        """At most `budget` likely verdicts on `draft`, which follows `text`, the likeliest
        first."""

    @abstractmethod
    def prepare(
        self, text: list[int], draft: Sequence[int], outcomes: Sequence[Outcome], draft_length: int
    ) -> SuccessorDrafts:
        """The successor of each outcome, or of fewer."""


class DraftTask(NamedTuple):
    """A session and the arguments of its `draft`."""

    session: Any
    text: list[int]
    draft_length: int


class PrepareTask(NamedTuple):
    """A session and the arguments of its `prepare`."""

    session: Any
    text: list[int]
    draft: Sequence[int]
    outcomes: Sequence[Outcome]
    draft_length: int


class Preparer(ABC):
    """Makes sessions, and drafts for several of them at a time.

    The joint methods answer as the sessions would alone. A session may have one task at a time."""

    most_together: int = 1
    """Most tasks that share a pass."""

    @abstractmethod
    def open(self, outcome_budget: int) -> PreparingSession:
        """A session whose passes prepare up to `outcome_budget` outcomes."""

    def draft_together(self, tasks: Sequence[DraftTask]) -> list[Draft]:
        return [task.session.draft(task.text, task.draft_length) for task in tasks]

    def prepare_together(self, tasks: Sequence[PrepareTask]) -> list[SuccessorDrafts]:
        return [
            task.session.prepare(task.text, task.draft, task.outcomes, task.draft_length)
            for task in tasks
        ]
