"""Which verdicts on a draft are likely, from what the drafter itself thinks of each place.

It knows probabilities and token ids, no tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from d3d.core.types import Outcome


class Place(NamedTuple):
    """Guesses for one position behind an anchor, best first, each with the drafter's probability."""

    token_ids: tuple[int, ...]
    chances: tuple[float, ...]

    def chance(self, token_id: int) -> float:
        """0 for a token that is not among the guesses."""
        return next((chance for guess, chance in zip(self.token_ids, self.chances, strict=True) if guess == token_id), 0.0)


def likely_outcomes(draft: Sequence[int], places: Sequence[Place], budget: int) -> list[Outcome]:
    """At most `budget` verdicts, the likeliest first; from two on, one that accepts the whole draft is among them if there is a guess.

    places[k]: guesses for the token that follows k accepted ones, len(draft) + 1 of them. The chance of an outcome is that of the k tokens
    times that of the guess; a rejected token is never its own bonus token. Raises ValueError for too few places or no budget.
    """
    if budget < 1 or len(places) <= len(draft):
        raise ValueError(
            f"{len(draft)} drafted tokens need {len(draft) + 1} places and a budget of 1 or more, not {len(places)} and {budget}"
        )
    found: list[tuple[float, Outcome]] = []
    reached = 1.0
    for num_accepted in range(len(draft) + 1):
        rejected = draft[num_accepted] if num_accepted < len(draft) else None
        guesses = zip(*places[num_accepted], strict=True)
        found += [(reached * chance, Outcome(num_accepted, guess)) for guess, chance in guesses if guess != rejected and chance > 0]
        if rejected is not None:
            reached *= places[num_accepted].chance(rejected)
    found.sort(key=lambda pair: -pair[0])
    return within_budget([outcome for _, outcome in found], budget, len(draft))


def within_budget(outcomes: Sequence[Outcome], budget: int, draft_length: int) -> list[Outcome]:
    """The first `budget` outcomes; from two on, the best that accepts the whole draft is the last of them where it would be left out.

    What was cut to a larger budget before can be cut to a smaller one: the same comes out.
    """
    best = list(outcomes[:budget])
    if budget > 1 and all(outcome.num_accepted < draft_length for outcome in best):
        whole = next((outcome for outcome in outcomes if outcome.num_accepted == draft_length), None)
        return best if whole is None else [*best[: budget - 1], whole]
    return best
