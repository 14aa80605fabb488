"""Drafting only while it pays: a drafter whose recent drafts were hardly kept is left alone for
some rounds.

A draft costs its pass whether or not it is kept, so cutting it afterwards saves little
(`d3d.drafting.confidence`). Each text keeps a running mean of what its drafts came to; while it is
below a threshold, only every RETRY-th round asks the drafter. The threshold of least time per token
is about what a draft and its rows cost, in plain steps. Which rounds draft depends on the text and
the drafts, on no clock."""

from __future__ import annotations

from collections.abc import Sequence as ListLike
from dataclasses import dataclass, field
from functools import partial

from d3d.core.prefix import common_prefix
from d3d.core.protocols import DraftSession
from d3d.core.sequence import Sequence
from d3d.core.types import DraftBlock
from d3d.drafting.around import Around, AroundSession

NEWEST_SHARE = 0.2
"""Weight of the newest draft in the mean."""
RETRY = 8
"""While drafting does not pay, one round in so many drafts."""
FIRST_MEAN = 2.0
"""Tokens that a draft is taken to have brought before there was one; a higher threshold is met at
first, too."""


@dataclass(frozen=True)
class Pausing(Around):
    """Asks `drafter` while `least_kept` tokens of its drafts are kept in the mean."""

    least_kept: float

    def _around(self, session: DraftSession, num_sequences: int) -> DraftSession:
        return PausingSession(session, partial(History, self.least_kept), num_sequences)


@dataclass
class History:
    """What the drafts of one text came to."""

    least_kept: float
    mean: float = field(init=False)
    """Drafted tokens kept, the bonus token not counted."""
    paused: int = 0
    """Rounds without a draft since the last one."""
    draft: tuple[int, ...] | None = None
    """The last one, until it is seen what became of it."""
    place: int = 0
    """Where in the text it was to stand."""

    def __post_init__(self) -> None:
        self.mean = max(FIRST_MEAN, self.least_kept)

    def look(self, text: ListLike[int]) -> None:
        """See how much of the last draft the text has kept."""
        if self.draft is None:
            return
        self.mean += NEWEST_SHARE * (common_prefix(self.draft, text[self.place :]) - self.mean)
        self.draft = None

    def begin_round(self) -> bool:
        """Whether it is to draft."""
        if self.mean >= self.least_kept or self.paused >= RETRY - 1:
            self.paused = 0
            return True
        self.paused += 1
        return False


class PausingSession(AroundSession[History]):
    """Each sequence has a history."""

    def draft(self, sequences: ListLike[Sequence], lengths: ListLike[int]) -> list[DraftBlock]:
        wanted = []
        for history, sequence, length in zip(self._own, sequences, lengths, strict=True):
            history.look(sequence.token_ids)
            wanted.append(length if length and history.begin_round() else 0)
        if not any(wanted):
            return [DraftBlock() for _ in sequences]
        blocks = self._session.draft(sequences, wanted)
        for history, sequence, block, length in zip(
            self._own, sequences, blocks, wanted, strict=True
        ):
            if length:
                history.draft, history.place = block.token_ids, len(sequence)
        return blocks
