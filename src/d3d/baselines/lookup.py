"""Prompt lookup: propose what followed the last time that the text ended like this
(`d3d.drafting.ngrams`).

It needs no model, and helps where answers repeat their prompt: summaries, edits, code.
"""

from __future__ import annotations

from collections.abc import Sequence as ListLike
from dataclasses import dataclass

from d3d.core.sequence import Sequence
from d3d.core.types import DraftBlock
from d3d.drafting.ngrams import NgramIndex


@dataclass(frozen=True)
class LookupDrafter:
    """Looks for the last `longest` tokens of a text in the text itself, then for fewer of them,
    down to `shortest`."""

    block_size: int = 16
    longest: int = 3
    shortest: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.shortest <= self.longest:
            raise ValueError(
                f"shortest must be within 1 and longest, got {self.shortest} and {self.longest}"
            )

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
        self._indices += [
            NgramIndex(self._drafter.shortest, self._drafter.longest) for _ in range(count)
        ]
