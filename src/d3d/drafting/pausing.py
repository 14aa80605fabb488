"""Drafting only while it pays: a drafter whose recent drafts were hardly kept is left alone for some rounds.

A draft costs its pass whether or not it is kept, so cutting it afterwards saves little (`d3d.drafting.confidence`). Each text keeps a
running mean of what its drafts came to; while it is below a threshold, only every RETRY-th round asks the drafter. The threshold of least
time per token is about what a draft and its rows cost, in plain steps; it is found by measurement (`d3d tune`). Which rounds draft depends
on committed tokens alone, and what is verified does not depend on it.
"""

from __future__ import annotations

from collections.abc import Sequence as ListLike
from dataclasses import dataclass

from d3d.core.protocols import Closable, DraftSession, SelfDrafter, TargetSession
from d3d.core.sequence import Sequence
from d3d.core.types import DraftBlock

NEWEST_SHARE = 0.2
"""Weight of the newest draft in the mean."""
RETRY = 8
"""While drafting does not pay, one round in so many drafts."""
FIRST_MEAN = 2.0
"""Tokens that a draft is taken to bring before there was one."""


@dataclass(frozen=True)
class Pausing:
    """Asks `drafter` while its drafts keep `least_kept` tokens in the mean."""

    drafter: SelfDrafter
    least_kept: float

    @property
    def block_size(self) -> int:
        return self.drafter.block_size

    def open(self, num_sequences: int, capacity: int) -> PausingSession:
        return PausingSession(self.drafter.open(num_sequences, capacity), self.least_kept, num_sequences)

    def open_beside(self, target: TargetSession) -> PausingSession | None:
        session = self.drafter.open_beside(target)
        return None if session is None else PausingSession(session, self.least_kept, len(target.lengths))


@dataclass
class History:
    """What the drafts of one text came to."""

    mean: float = FIRST_MEAN
    paused: int = 0
    """Rounds without a draft since the last one."""
    draft: tuple[int, ...] | None = None
    """The last one, until it is seen what became of it."""
    place: int = 0
    """Where in the text it was to stand."""

    def look(self, text: ListLike[int]) -> None:
        """See how much of the last draft the text has kept."""
        if self.draft is None:
            return
        same = [drafted == token_id for drafted, token_id in zip(self.draft, text[self.place :], strict=False)]
        kept = (same + [False]).index(False)
        self.mean += NEWEST_SHARE * (kept - self.mean)
        self.draft = None

    def wants(self, least_kept: float) -> bool:
        """Whether this round is to draft."""
        if self.mean >= least_kept or self.paused >= RETRY - 1:
            self.paused = 0
            return True
        self.paused += 1
        return False


class PausingSession:
    """A history a sequence, and the drafter's own session; see `DraftSession`."""

    def __init__(self, session: DraftSession, least_kept: float, num_sequences: int) -> None:
        self._session = session
        self._least_kept = least_kept
        self._histories = [History() for _ in range(num_sequences)]

    def draft(self, sequences: ListLike[Sequence], lengths: ListLike[int]) -> list[DraftBlock]:
        wanted = []
        for history, sequence, length in zip(self._histories, sequences, lengths, strict=True):
            history.look(sequence.token_ids)
            wanted.append(length if length and history.wants(self._least_kept) else 0)
        if not any(wanted):
            return [DraftBlock() for _ in sequences]
        blocks = self._session.draft(sequences, wanted)
        for history, sequence, block, length in zip(self._histories, sequences, blocks, wanted, strict=True):
            if length:
                history.draft, history.place = block.token_ids, len(sequence)
        return blocks

    def keep(self, rows: list[int]) -> None:
        self._histories = [self._histories[row] for row in rows]
        self._session.keep(rows)

    def join(self, count: int) -> None:
        self._histories += [History() for _ in range(count)]
        self._session.join(count)

    def close(self) -> None:
        if isinstance(self._session, Closable):
            self._session.close()
