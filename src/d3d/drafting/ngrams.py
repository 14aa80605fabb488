"""Where the end of a text stands earlier in it: what prompt lookup copies from.

The idea is Apoorv Saxena's (github.com/apoorvumang/prompt-lookup-decoding, 2023). Of several
earlier places the latest is taken."""

from __future__ import annotations

from collections.abc import Sequence as ListLike

LONGEST_RUN = 8
"""Tokens of the longest run that is worth looking for: a longer one says no more."""


class NgramIndex:
    """Where each run of tokens of a growing text was continued last. A token costs the same at its
    end as at its start."""

    def __init__(self, shortest: int, longest: int) -> None:
        self._sizes = range(longest, shortest - 1, -1)
        self._continued_at: dict[tuple[int, ...], int] = {}
        self._indexed = 0

    def extend(self, token_ids: ListLike[int]) -> None:
        """Take in what the text has grown by; its last token has no continuation yet."""
        for place in range(max(self._indexed, 1), len(token_ids)):
            for size in self._sizes:
                if size <= place:
                    self._continued_at[tuple(token_ids[place - size : place])] = place
        self._indexed = max(self._indexed, len(token_ids))

    def find(self, token_ids: ListLike[int]) -> int | None:
        """Index of the token that followed the longest known run which ends the text."""
        for size in self._sizes:
            if size < len(token_ids):
                place = self._continued_at.get(tuple(token_ids[-size:]))
                if place is not None:
                    return place
        return None


def continuation(token_ids: ListLike[int], start: int, length: int) -> tuple[int, ...]:
    """`length` tokens from `start` on; behind the text's end it goes on as a text that repeats what
    it holds from `start` on."""
    period = len(token_ids) - start
    return tuple(token_ids[start + place % period] for place in range(length))


class OwnPast:
    """What one growing text holds itself as a draft."""

    def __init__(self, shortest: int) -> None:
        self._index = NgramIndex(shortest, max(shortest, LONGEST_RUN))

    def copy(
        self, token_ids: ListLike[int], length: int, *, ahead: ListLike[int] = ()
    ) -> tuple[int, ...]:
        """`length` tokens to follow; none where the last ones do not stand earlier in the text.
        `ahead`: what may follow the text, and is to be followed in turn."""
        self._index.extend(token_ids)
        text = [*token_ids, *ahead] if ahead else token_ids
        found = self._index.find(text)
        return () if found is None else continuation(text, found, length)
