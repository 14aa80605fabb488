"""Candidate drafts in fused mode: from the slots of the last pass, and from the text itself."""

from __future__ import annotations

from itertools import accumulate
from operator import mul
from typing import NamedTuple

from d3d.methods.estimate import Estimate, Survival
from d3d.methods.fused.plan import PRIOR_KEPT, PRIOR_ROUNDS
from d3d.methods.ngram.lookup import PromptLookup

PRIOR_COPIED = 0.75
"""Prior acceptance probability of a copied token that follows slot-drafted tokens."""

PRIOR_TOKENS = 4
"""Weight of this prior, in tokens."""


class Offer(NamedTuple):
    """Tokens available for drafting."""

    tokens: tuple[int, ...]
    confidences: tuple[float, ...]
    """Probability that each is kept given that those before it are."""
    looked_up: bool = False

    def promise(self, most: int) -> float:
        """Expected number of kept tokens among its first `most`."""
        return float(sum(accumulate(self.confidences[:most], mul)))


class CopiedOffers:
    """Offers copied from one request's own text, with the acceptance that copies from this text
    have had."""

    def __init__(self, shortest: int, draft_length: int) -> None:
        self._past = PromptLookup(shortest)
        self._length = draft_length
        self.survival = Survival(draft_length, PRIOR_KEPT, PRIOR_ROUNDS)
        self._continued = Estimate(PRIOR_COPIED, PRIOR_TOKENS)

    def offer(self, token_ids: list[int]) -> Offer:
        """Copy what followed the text's end earlier; an empty offer if it has not occurred
        before."""
        tokens = self._past.copy(token_ids, self._length)
        if not tokens:
            return Offer((), (), looked_up=True)
        shares = self.survival.shares
        pairs = zip(shares, [1.0, *shares], strict=False)
        confidences = tuple(share / before if before else 0.0 for share, before in pairs)
        return Offer(tokens, confidences, looked_up=True)

    def continued(self, token_ids: list[int], offer: Offer) -> Offer:
        """Extend an offer by what followed its last tokens earlier in the text."""
        room = self._length - len(offer.tokens)
        if not offer.tokens or room < 1:
            return offer
        tokens = self._past.copy(token_ids, room, ahead=offer.tokens)
        chances = [self._continued.value] * len(tokens)
        return offer._replace(
            tokens=(*offer.tokens, *tokens), confidences=(*offer.confidences, *chances)
        )

    def add_continued(self, first: int, num_drafted: int, num_accepted: int) -> None:
        """Learn from a verdict on such a draft; its tokens are copies from `first` on."""
        # tokens after a rejected one say nothing
        judged = min(num_drafted, num_accepted + 1)
        self._continued.add(max(0, num_accepted - first), max(0, judged - first))
