"""Prompt lookup: draft what followed an earlier occurrence of the text's last tokens.

The idea is Apoorv Saxena's (github.com/apoorvumang/prompt-lookup-decoding, 2023). It needs no
model, and helps if answers repeat their prompt (summaries, edits, code) or themselves. The latest
earlier occurrence wins. Serves method `ngram` and `--lookup`."""

from __future__ import annotations

from collections.abc import Sequence

LONGEST_RUN = 8
"""Longest run to match, in tokens: a longer one adds nothing."""


class PromptLookup:
    """Index of a growing text's runs of tokens and their latest continuations. The cost per token
    does not grow with the text."""

    def __init__(self, shortest: int, longest: int = LONGEST_RUN) -> None:
        """Matches the last `longest` tokens, then fewer, down to `shortest`. Raises ValueError for
        a `shortest` below 1."""
        if shortest < 1:
            raise ValueError(f"shortest must be 1 or more, got {shortest}")
        self._sizes = range(max(shortest, longest), shortest - 1, -1)
        self._continued_at: dict[tuple[int, ...], int] = {}
        self._indexed = 0

    def copy(
        self, token_ids: Sequence[int], length: int, *, ahead: Sequence[int] = ()
    ) -> tuple[int, ...]:
        """Copy `length` tokens to follow the text; none if its last ones have not occurred before.

        ahead: tokens assumed to follow the text, to be continued in turn. A copy that reaches the
        text's end goes on with its own tokens."""
        self._extend(token_ids)
        text = [*token_ids, *ahead] if ahead else token_ids
        start = self._find(text)
        if start is None:
            return ()
        period = len(text) - start
        return tuple(text[start + place % period] for place in range(length))

    def _extend(self, token_ids: Sequence[int]) -> None:
        """Index new tokens of the text; its last one has no continuation yet."""
        for place in range(max(self._indexed, 1), len(token_ids)):
            for size in self._sizes:
                if size <= place:
                    self._continued_at[tuple(token_ids[place - size : place])] = place
        self._indexed = max(self._indexed, len(token_ids))

    def _find(self, token_ids: Sequence[int]) -> int | None:
        """Position of the token that followed the longest known run at the text's end."""
        for size in self._sizes:
            if size < len(token_ids):
                place = self._continued_at.get(tuple(token_ids[-size:]))
                if place is not None:
                    return place
        return None
