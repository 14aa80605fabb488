"""Prompt lookup: propose what followed the last time that the text ended like this.

The idea is Apoorv Saxena's (github.com/apoorvumang/prompt-lookup-decoding, 2023). It needs no model, and helps where answers repeat
their prompt: summaries, edits, code. Of several earlier places the latest is taken.
"""

from __future__ import annotations

from collections.abc import Sequence as ListLike
from dataclasses import dataclass

from d3d.core.sequence import Sequence
from d3d.core.types import DraftBlock


@dataclass(frozen=True)
class LookupDrafter:
    """Looks for the last `longest` tokens of a text in the text itself, then for fewer of them, down to `shortest`."""

    block_size: int = 16
    longest: int = 3
    shortest: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.shortest <= self.longest:
            raise ValueError(f"shortest must be within 1 and longest, got {self.shortest} and {self.longest}")

    def open(self, num_sequences: int, capacity: int) -> LookupSession:  # noqa: ARG002 - the index grows as it needs to
        return LookupSession(self, num_sequences)


class LookupSession:
    """One index a sequence; see `DraftSession`."""

    def __init__(self, drafter: LookupDrafter, num_sequences: int) -> None:
        self._drafter = drafter
        self._indices: list[NgramIndex] = []
        self.join(num_sequences)

    def draft(self, sequences: ListLike[Sequence], lengths: ListLike[int]) -> list[DraftBlock]:
        blocks = []
        for index, sequence, length in zip(self._indices, sequences, lengths, strict=True):
            index.extend(sequence.token_ids)
            found = index.find(sequence.token_ids)
            end = 0 if found is None else found + min(length, self._drafter.block_size)
            blocks.append(DraftBlock(tuple(sequence.token_ids[found:end])))
        return blocks

    def keep(self, rows: list[int]) -> None:
        self._indices = [self._indices[row] for row in rows]

    def join(self, count: int) -> None:
        self._indices += [NgramIndex(self._drafter.shortest, self._drafter.longest) for _ in range(count)]


class NgramIndex:
    """Where each run of tokens of a growing text was continued last. A token costs the same at its end as at its start."""

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
