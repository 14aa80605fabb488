"""Drafts to choose from in fused mode: what the slots of the last pass say, and what the text itself holds."""

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


class LookedUp:
    """What one text's own past offers (`d3d.drafting.ngrams`). How much of it is kept is what this text has shown so far."""

    def __init__(self, shortest: int, draft_length: int) -> None:
        self._past = OwnPast(shortest)
        self._length = draft_length
        self.survival = Survival(draft_length)

    def offer(self, token_ids: list[int]) -> Offer:
        """Nothing where the text's end does not stand earlier in it."""
        tokens = self._past.copy(token_ids, self._length)
        if not tokens:
            return Offer((), (), looked_up=True)
        shares = self.survival.shares
        confidences = tuple(share / before if before else 0.0 for share, before in zip(shares, [1.0, *shares], strict=False))
        return Offer(tokens, confidences, looked_up=True)
