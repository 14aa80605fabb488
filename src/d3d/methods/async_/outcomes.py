"""Likely verdicts on a draft, from the drafter's own probabilities. Works on token ids and
probabilities, without tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from d3d.methods.estimate import Estimate

MOST_OUTCOMES = 256
"""Largest outcome budget."""


class Outcome(NamedTuple):
    """A possible verdict."""

    num_accepted: int
    bonus_token: int


class Place(NamedTuple):
    """Guesses for one position, best first, each with the drafter's probability."""

    token_ids: tuple[int, ...]
    chances: tuple[float, ...]

    def chance(self, token_id: int) -> float:
        """The probability of a token; 0 if it is not among the guesses."""
        return next(
            (
                chance
                for guess, chance in zip(self.token_ids, self.chances, strict=True)
                if guess == token_id
            ),
            0.0,
        )


PRIOR = 0.2
"""Weight of the prior in `Doubt`, in rejections seen and expected. Small, so that four or five
verdicts outweigh it."""


class Doubt:
    """Calibrates the probabilities of clean rows, from a sequence's verdicts.

    A clean row predicts about as the target does, so it gives the probability of a token being
    *sampled*. A greedy target takes the best token however unlikely it is, and one at a low
    temperature nearly so. A token of probability p is therefore taken to be kept with probability p
    ** weight: weight 1 if the probabilities are right, near 0 if the best token always comes.

    The weight is rejections seen / rejections expected; a token of probability p counts as -ln p
    expected ones: the maximum-likelihood estimate if -ln p is the hazard of a rejection. Both begin
    at PRIOR."""

    def __init__(self) -> None:
        self._rejections = Estimate(1.0, PRIOR)

    @property
    def weight(self) -> float:
        return self._rejections.value

    def learn(self, chances: Sequence[float], kept: int, seen: int) -> None:
        """chances: of a draft's first tokens, of which the target has decided `seen` and kept the
        first `kept`."""
        decided = chances[: min(seen, kept + 1)]
        expected = sum(-math.log(max(chance, 1e-9)) for chance in decided)
        self._rejections.add(kept < len(decided), expected)


def weighted(chance: float, doubt: float, *, best: bool) -> float:
    """The probability that a token is kept, from what its clean row gives it. best: whether it is
    that row's most likely token; a smaller `doubt` raises its probability and lowers that of the
    others."""
    return chance**doubt if best else chance * min(1.0, doubt)


def likely_outcomes(
    draft: Sequence[int],
    places: Sequence[Place],
    budget: int,
    *,
    num_clean: int = 0,
    doubt: float = 1.0,
) -> list[Outcome]:
    """At most `budget` verdicts, the most likely first; a budget of two or more includes one that
    accepts the whole draft, if there is a guess for it.

    places[k]: guesses for the token after k accepted ones; there are len(draft) + 1. An outcome's
    probability is that of k tokens being kept, times that of the next being rejected, times that of
    the guess given the rejection; a rejected token is never its own bonus token. The probability
    of being kept is the drafter's, in the first `num_clean` places weighted by `doubt` (see
    `weighted`). Raises ValueError for too few places or no budget."""
    if budget < 1 or len(places) <= len(draft):
        raise ValueError(
            f"{len(draft)} drafted tokens need {len(draft) + 1} places and a budget of 1 or more, "
            f"not {len(places)} and {budget}"
        )
    scored: list[tuple[float, Outcome]] = []
    reached = 1.0
    for num_accepted, place in enumerate(places[: len(draft) + 1]):
        rejected = draft[num_accepted] if num_accepted < len(draft) else None
        chance = 0.0 if rejected is None else place.chance(rejected)
        is_clean = num_accepted < num_clean
        kept = weighted(chance, doubt, best=rejected in place.token_ids[:1]) if is_clean else chance
        scale = reached * ((1.0 - kept) / (1.0 - chance) if chance < 1.0 else 1.0)
        guesses = zip(*place, strict=True)
        scored += [
            (scale * guess, Outcome(num_accepted, token))
            for token, guess in guesses
            if token != rejected and guess > 0
        ]
        reached *= kept
    scored.sort(key=lambda pair: -pair[0])
    return within_budget([outcome for _, outcome in scored], budget, len(draft))


def within_budget(outcomes: Sequence[Outcome], budget: int, draft_length: int) -> list[Outcome]:
    """The first `budget` outcomes. If none of two or more accepts the whole draft, the best one
    that does replaces the last.

    Cutting a list that was cut to a larger budget gives the same result."""
    best = list(outcomes[:budget])
    if budget > 1 and all(outcome.num_accepted < draft_length for outcome in best):
        whole = next(
            (outcome for outcome in outcomes if outcome.num_accepted == draft_length), None
        )
        return best if whole is None else [*best[: budget - 1], whole]
    return best
