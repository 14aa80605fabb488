"""Prompt lookup: a text's end that stands earlier in it says how it may go on.

The idea is Apoorv Saxena's (github.com/apoorvumang/prompt-lookup-decoding, 2023). It needs no
model, and helps if answers repeat their prompt (summaries, edits, code) or themselves. Of several
earlier places the latest is taken. The one implementation for method `ngram` and for `--lookup`."""

from __future__ import annotations

from collections.abc import Sequence

LONGEST_RUN = 8
"""Tokens of the longest run that is worth looking for: a longer one says no more."""


class PromptLookup:
    """Runs of tokens of one growing text, and where each was continued last. A token costs the same
    at the text's end as at its start."""

    def __init__(self, shortest: int, longest: int = LONGEST_RUN) -> None:
        """Looks for the last `longest` tokens, then for fewer, down to `shortest`.
        Raises ValueError for a `shortest` below 1."""
        if shortest < 1:
            raise ValueError(f"shortest must be 1 or more, got {shortest}")
        self._sizes = range(max(shortest, longest), shortest - 1, -1)
        self._continued_at: dict[tuple[int, ...], int] = {}
        self._indexed = 0

    def copy(
        self, token_ids: Sequence[int], length: int, *, ahead: Sequence[int] = ()
    ) -> tuple[int, ...]:
        """`length` tokens to follow the text; none if its last ones do not stand earlier in it.

        ahead: tokens that may follow the text, and are to be followed in turn. Behind the text's
        end a copy goes on as a text that repeats itself."""
        self._extend(token_ids)
        text = [*token_ids, *ahead] if ahead else token_ids
        start = self._find(text)
        if start is None:
            return ()
        period = len(text) - start
        return tuple(text[start + place % period] for place in range(length))

    def _extend(self, token_ids: Sequence[int]) -> None:
        """Index what the text has grown by; its last token has no continuation yet."""
        for place in range(max(self._indexed, 1), len(token_ids)):
            for size in self._sizes:
                if size <= place:
                    self._continued_at[tuple(token_ids[place - size : place])] = place
        self._indexed = max(self._indexed, len(token_ids))

    def _find(self, token_ids: Sequence[int]) -> int | None:
        """Index of the token that followed the longest known run which ends the text."""
        for size in self._sizes:
            if size < len(token_ids):
                place = self._continued_at.get(tuple(token_ids[-size:]))
                if place is not None:
                    return place
        return None
