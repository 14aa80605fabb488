"""Drafts to choose from in fused mode: what the slots of the last pass say, and what the text
itself holds."""

from __future__ import annotations

from itertools import accumulate
from operator import mul
from typing import NamedTuple

from d3d.drafting.fused_plan import Survival
from d3d.drafting.ngrams import OwnPast


class Offer(NamedTuple):
    """Tokens that may be drafted."""

    tokens: tuple[int, ...]
    confidences: tuple[float, ...]
    """The probability that each is kept, given that those before it are."""
    looked_up: bool = False

    def promise(self, most: int) -> float:
        """How many of its first `most` tokens will be kept, in the mean."""
        return float(sum(accumulate(self.confidences[:most], mul)))


FIRST_SHARE = 0.75
"""Share of the copies behind a slots' draft that is taken to be kept, one after the other, until
rounds have shown it."""

SHARE_ROUNDS = 4
"""How many tokens that guess counts for."""


class LookedUp:
    """What one text's own past offers (`d3d.drafting.ngrams`). How much of it is kept is what this
    text has shown so far."""

    def __init__(self, shortest: int, draft_length: int) -> None:
        self._past = OwnPast(shortest)
        self._length = draft_length
        self.survival = Survival(draft_length)
        self._continued, self._kept = float(SHARE_ROUNDS), SHARE_ROUNDS * FIRST_SHARE

    def offer(self, token_ids: list[int]) -> Offer:
        """Nothing where the text's end does not stand earlier in it."""
        tokens = self._past.copy(token_ids, self._length)
        if not tokens:
            return Offer((), (), looked_up=True)
        shares = self.survival.shares
        confidences = tuple(
            share / before if before else 0.0
            for share, before in zip(shares, [1.0, *shares], strict=False)
        )
        return Offer(tokens, confidences, looked_up=True)

    def gone_on(self, token_ids: list[int], offer: Offer) -> Offer:
        """The offer, and behind it what followed its last tokens where they stand earlier in the
        text."""
        room = self._length - len(offer.tokens)
        tokens = (
            self._past.copy(token_ids, room, ahead=offer.tokens)
            if offer.tokens and room > 0
            else ()
        )
        return offer._replace(
            tokens=(*offer.tokens, *tokens),
            confidences=(*offer.confidences, *[self._kept / self._continued] * len(tokens)),
        )

    def add_gone_on(self, first: int, num_drafted: int, num_accepted: int) -> None:
        """What a round has shown of such a draft, whose tokens are copies from `first` on."""
        judged = min(
            num_drafted, num_accepted + 1
        )  # what stands behind a token that was not kept says nothing
        self._continued += max(0, judged - first)
        self._kept += max(0, num_accepted - first)
