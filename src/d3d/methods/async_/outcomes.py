"""Which verdicts on a draft are likely, from what the drafter itself thinks of each place.

It knows probabilities and token ids, no tensors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from d3d.methods.estimate import Estimate

MOST_OUTCOMES = 256
"""Most verdicts that may be prepared for in a round."""


class Outcome(NamedTuple):
    """A possible verdict."""

    num_accepted: int
    bonus_token: int


class Place(NamedTuple):
    """Guesses for one position behind an anchor, best first, each with the drafter's
    probability."""

    token_ids: tuple[int, ...]
    chances: tuple[float, ...]

    def chance(self, token_id: int) -> float:
        """0 for a token that is not among the guesses."""
        return next(
            (
                chance
                for guess, chance in zip(self.token_ids, self.chances, strict=True)
                if guess == token_id
            ),
            0.0,
        )


PRIOR = 0.2
"""Rejections that a sequence is taken to have seen, and to have expected, before its first verdict.
Small: four or five verdicts tell."""


class Doubt:
    """How much a clean row's doubt about a drafted token is worth, learned from a sequence's
    verdicts.

    Such a row predicts about as the target does, so its chances are those of a token being
    *sampled*. A greedy target takes the best token however unlikely, one at a low temperature
    nearly so. The chance that a token is kept is therefore taken to be chance ** weight: 1 if the
    chances are right, near 0 if the best token always comes. The weight is rejections / rejections
    expected, a token of chance c counting as -ln c of them: the maximum-likelihood estimate if
    -ln c is the hazard of a rejection, with PRIOR of each at first."""

    def __init__(self) -> None:
        self._rejections = Estimate(1.0, PRIOR)

    @property
    def weight(self) -> float:
        return self._rejections.value

    def learn(self, chances: Sequence[float], kept: int, seen: int) -> None:
        """chances: of a draft's first tokens; of these tokens `seen` have been decided, and the
        first `kept` of them stayed."""
        decided = chances[: min(seen, kept + 1)]
        expected = sum(-math.log(max(chance, 1e-9)) for chance in decided)
        self._rejections.add(kept < len(decided), expected)


def weighted(chance: float, doubt: float, *, best: bool) -> float:
    """The chance that a token is kept, from what a clean row gives it; `best`: whether it is the
    likeliest there. The less the doubt of such rows means, the surer the best token comes, and the
    surer no other does."""
    return chance**doubt if best else chance * min(1.0, doubt)


def likely_outcomes(
    draft: Sequence[int],
    places: Sequence[Place],
    budget: int,
    *,
    num_clean: int = 0,
    doubt: float = 1.0,
) -> list[Outcome]:
    """At most `budget` verdicts, the likeliest first; from two on, one that accepts the whole draft
    is among them if there is a guess.

    places[k]: guesses for the token that follows k accepted ones, len(draft) + 1 of them. The
    chance of an outcome is that of the k tokens being kept, times that of a rejection behind them,
    times that of the guess given a rejection; a rejected token is never its own bonus token. A
    token's chance to be kept is the drafter's, in the first `num_clean` places as `doubt` has it
    (see `Doubt`, `weighted`). Raises ValueError for too few places or no budget."""
    if budget < 1 or len(places) <= len(draft):
        raise ValueError(
            f"{len(draft)} drafted tokens need {len(draft) + 1} places and a budget of 1 or more, "
            f"not {len(places)} and {budget}"
        )
    found: list[tuple[float, Outcome]] = []
    reached = 1.0
    for num_accepted, place in enumerate(places[: len(draft) + 1]):
        rejected = draft[num_accepted] if num_accepted < len(draft) else None
        chance = 0.0 if rejected is None else place.chance(rejected)
        is_clean = num_accepted < num_clean
        kept = weighted(chance, doubt, best=rejected in place.token_ids[:1]) if is_clean else chance
        scale = reached * ((1.0 - kept) / (1.0 - chance) if chance < 1.0 else 1.0)
        guesses = zip(*place, strict=True)
        found += [
            (scale * guess, Outcome(num_accepted, token))
            for token, guess in guesses
            if token != rejected and guess > 0
        ]
        reached *= kept
    found.sort(key=lambda pair: -pair[0])
    return within_budget([outcome for _, outcome in found], budget, len(draft))


def within_budget(outcomes: Sequence[Outcome], budget: int, draft_length: int) -> list[Outcome]:
    """The first `budget` outcomes; from two on, the best that accepts the whole draft is the last
    of them where it would be left out.

    What was cut to a larger budget before can be cut to a smaller one: the same comes out.
    """
    best = list(outcomes[:budget])
    if budget > 1 and all(outcome.num_accepted < draft_length for outcome in best):
        whole = next(
            (outcome for outcome in outcomes if outcome.num_accepted == draft_length), None
        )
        return best if whole is None else [*best[: budget - 1], whole]
    return best
