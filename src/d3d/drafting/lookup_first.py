"""A drafter that is asked only where the text does not say by itself how it goes on.

Where the last tokens stand earlier in the text, what followed them there is the draft (prompt
lookup, `d3d.drafting.ngrams`), and the drafter's pass is saved. Answers repeat names, numbers and
code of their prompt, and small models repeat themselves."""

from __future__ import annotations

from collections.abc import Sequence as ListLike
from dataclasses import dataclass
from functools import partial

from d3d.core.protocols import DraftSession
from d3d.core.sequence import Sequence
from d3d.core.types import DraftBlock
from d3d.drafting.around import Around, AroundSession
from d3d.drafting.ngrams import OwnPast


@dataclass(frozen=True)
class LookupFirst(Around):
    """Asks `drafter` where the last `shortest` tokens of a text do not stand earlier in it. Lengths
    are the same for both."""

    shortest: int

    def _around(self, session: DraftSession, num_sequences: int) -> DraftSession:
        return LookupFirstSession(session, partial(OwnPast, self.shortest), num_sequences)


class LookupFirstSession(AroundSession[OwnPast]):
    """Each sequence has its own past."""

    def draft(self, sequences: ListLike[Sequence], lengths: ListLike[int]) -> list[DraftBlock]:
        copied = [
            past.copy(one.token_ids, length)
            for past, one, length in zip(self._own, sequences, lengths, strict=True)
        ]
        open_lengths = [
            0 if block else length for block, length in zip(copied, lengths, strict=True)
        ]
        if not any(open_lengths):
            return [DraftBlock(block, looked_up=True) for block in copied]
        drafted = self._session.draft(sequences, open_lengths)
        return [
            DraftBlock(block, looked_up=True) if block else other
            for block, other in zip(copied, drafted, strict=True)
        ]
