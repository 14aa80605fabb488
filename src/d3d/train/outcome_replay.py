"""Hit rate without a clock: replay rounds on recorded answers, and look each verdict up among the
outcomes that would have been listed.

What is replayed is what a draft worker does, in its own order: draft behind the committed tokens,
list the likely outcomes of the draft. The verdict that followed stands in the record. Outcomes come
best first, so one list with the largest budget answers for all smaller ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from d3d.core.protocols import Preparer, PreparingSession
from d3d.core.types import Outcome
from d3d.drafting.outcomes import within_budget
from d3d.train.acceptance import Acceptance
from d3d.train.corpus import Sample

BUDGETS = (1, 2, 4, 8, 16, 32, 64)


@dataclass
class Hits:
    """Counts over the rounds that another round followed: those whose successor was wanted."""

    draft_length: int
    budgets: tuple[int, ...] = BUDGETS
    wanted: list[int] = field(default_factory=list)
    """By the verdict's num_accepted, 0..draft_length."""
    hits: dict[int, list[int]] = field(default_factory=dict)
    """Those whose verdict was among the outcomes, by budget, then as `wanted`."""

    def __post_init__(self) -> None:
        places = self.draft_length + 1
        self.wanted = self.wanted or [0] * places
        self.hits = self.hits or {budget: [0] * places for budget in self.budgets}

    def add(self, outcomes: Sequence[Outcome], verdict: Outcome, drafted: int) -> None:
        """outcomes: listed for the largest budget, of a draft of `drafted` tokens."""
        self.wanted[verdict.num_accepted] += 1
        for budget, hits in self.hits.items():
            hits[verdict.num_accepted] += verdict in within_budget(outcomes, budget, drafted)

    @property
    def hit_rate(self) -> dict[int, float | None]:
        """By budget."""
        return {budget: _share(sum(hits), sum(self.wanted)) for budget, hits in self.hits.items()}

    @property
    def hit_rate_at(self) -> dict[int, list[float | None]]:
        """By budget, then by num_accepted."""
        return {
            budget: [_share(hit, of) for hit, of in zip(hits, self.wanted, strict=True)]
            for budget, hits in self.hits.items()
        }

    def to_dict(self) -> dict[str, Any]:
        return {
            "rounds_wanting": self.wanted,
            "hit_rate": {str(budget): rate for budget, rate in self.hit_rate.items()},
            "hit_rate_at": {str(budget): rates for budget, rates in self.hit_rate_at.items()},
        }


def total_hits(parts: Iterable[Hits]) -> Hits:
    """All of them together; they share draft length and budgets. Raises ValueError where they do
    not, or there are none."""
    parts = list(parts)
    shapes = {(part.draft_length, part.budgets) for part in parts}
    if len(shapes) != 1:
        raise ValueError(f"hits of {len(shapes)} draft lengths and budgets don't add up")
    whole = Hits(*shapes.pop())
    for part in parts:
        whole.wanted = _sums(whole.wanted, part.wanted)
        whole.hits = {budget: _sums(hits, part.hits[budget]) for budget, hits in whole.hits.items()}
    return whole


def replay_outcomes(
    preparer: Preparer,
    samples: Iterable[Sample],
    draft_length: int,
    on_sample: Callable[[], None] = lambda: None,
    *,
    budgets: tuple[int, ...] = BUDGETS,
) -> tuple[Acceptance, Hits]:
    """Rounds of async mode over recorded answers, as if every successor came in time; the first
    answer token belongs to no round."""
    acceptance, hits = Acceptance(draft_length), Hits(draft_length, budgets)
    for sample in samples:
        if len(sample.answer_ids) > 1:
            session = preparer.open(len(sample.token_ids) + draft_length, max(budgets))
            acceptance.add_answer(_walk(session, sample, draft_length, hits))
        on_sample()
    return acceptance, hits


def _walk(session: PreparingSession, sample: Sample, draft_length: int, hits: Hits) -> Acceptance:
    acceptance = Acceptance(draft_length)
    token_ids, anchor = sample.token_ids, len(sample.prompt_ids)
    while anchor < len(token_ids) - 1:
        text, truth = token_ids[: anchor + 1], token_ids[anchor + 1 :]
        draft = session.draft(text, draft_length).token_ids
        differs = (
            place
            for place, (drafted, wanted) in enumerate(zip(draft, truth, strict=False))
            if drafted != wanted
        )
        num_accepted = next(differs, min(len(draft), len(truth)))
        committed = min(num_accepted + 1, len(truth))
        acceptance.add_round(num_accepted, committed)
        anchor += committed
        if anchor < len(token_ids) - 1:
            outcomes = session.likely_outcomes(text, draft, max(hits.budgets))
            hits.add(outcomes, Outcome(num_accepted, token_ids[anchor]), len(draft))
    return acceptance


def _sums(a: Sequence[int], b: Sequence[int]) -> list[int]:
    return [x + y for x, y in zip(a, b, strict=True)]


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None
