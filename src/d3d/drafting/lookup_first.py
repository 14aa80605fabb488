"""A drafter that is asked only where the text does not say by itself how it goes on.

Where the last tokens stand earlier in the text, what followed them there is the draft (prompt lookup, `d3d.drafting.ngrams`), and the
drafter's pass is saved. Answers repeat names, numbers and code of their prompt, and small models repeat themselves.
"""

from __future__ import annotations

from collections.abc import Sequence as ListLike
from dataclasses import dataclass

from d3d.core.protocols import DraftSession, SelfDrafter, TargetSession
from d3d.core.sequence import Sequence
from d3d.core.types import DraftBlock
from d3d.drafting.ngrams import LONGEST_RUN, NgramIndex, continuation


@dataclass(frozen=True)
class LookupFirst:
    """Asks `drafter` where the last `shortest` tokens of a text do not stand earlier in it. Lengths are the same for both."""

    drafter: SelfDrafter
    shortest: int

    @property
    def block_size(self) -> int:
        return self.drafter.block_size

    def open(self, num_sequences: int, capacity: int) -> LookupFirstSession:
        return LookupFirstSession(self.drafter.open(num_sequences, capacity), self.shortest, num_sequences)

    def open_beside(self, target: TargetSession) -> LookupFirstSession | None:
        session = self.drafter.open_beside(target)
        return None if session is None else LookupFirstSession(session, self.shortest, len(target.lengths))


class LookupFirstSession:
    """An index a sequence, and the drafter's own session; see `DraftSession`."""

    def __init__(self, session: DraftSession, shortest: int, num_sequences: int) -> None:
        self._session = session
        self._shortest = shortest
        self._indices: list[NgramIndex] = []
        self._add(num_sequences)

    @property
    def lengths(self) -> list[int]:
        """Tokens in the drafter's own cache. Raises AttributeError where it has none."""
        lengths: list[int] = self._session.lengths  # type: ignore[attr-defined]
        return lengths

    def draft(self, sequences: ListLike[Sequence], lengths: ListLike[int]) -> list[DraftBlock]:
        copied = []
        for index, sequence, length in zip(self._indices, sequences, lengths, strict=True):
            index.extend(sequence.token_ids)
            found = index.find(sequence.token_ids)
            copied.append(() if found is None else continuation(sequence.token_ids, found, length))
        open_lengths = [0 if block else length for block, length in zip(copied, lengths, strict=True)]
        if not any(open_lengths):
            return [DraftBlock(block, looked_up=True) for block in copied]
        drafted = self._session.draft(sequences, open_lengths)
        return [DraftBlock(block, looked_up=True) if block else other for block, other in zip(copied, drafted, strict=True)]

    def keep(self, rows: list[int]) -> None:
        self._indices = [self._indices[row] for row in rows]
        self._session.keep(rows)

    def join(self, count: int) -> None:
        self._add(count)
        self._session.join(count)

    def _add(self, count: int) -> None:
        self._indices += [NgramIndex(self._shortest, max(self._shortest, LONGEST_RUN)) for _ in range(count)]
