"""Drafting only while it pays: a drafter whose recent drafts were hardly kept is left alone for some rounds.

A draft costs its pass whether or not it is kept, so cutting it afterwards saves little (`d3d.drafting.confidence`). Each text keeps a
running mean of what its drafts came to; while it is below a threshold, only every RETRY-th round asks the drafter. The threshold of least
time per token is about what a draft and its rows cost, in plain steps. Which rounds draft depends on the text and the drafts, on no clock.
"""

from __future__ import annotations

from collections.abc import Sequence as ListLike
from dataclasses import dataclass, field

from d3d.core.protocols import DraftSession, SelfDrafter, TargetSession
from d3d.core.sequence import Sequence
from d3d.core.types import DraftBlock

NEWEST_SHARE = 0.2
"""Weight of the newest draft in the mean."""
RETRY = 8
"""While drafting does not pay, one round in so many drafts."""
FIRST_MEAN = 2.0
"""Tokens that a draft is taken to have brought before there was one; a higher threshold is met at first, too."""


@dataclass(frozen=True)
class Pausing:
    """Asks `drafter` while `least_kept` tokens of its drafts are kept in the mean."""

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
        same = [drafted == token_id for drafted, token_id in zip(self.draft, text[self.place :], strict=False)]
        kept = (same + [False]).index(False)
        self.mean += NEWEST_SHARE * (kept - self.mean)
        self.draft = None

    def begin_round(self) -> bool:
        """Whether it is to draft."""
        if self.mean >= self.least_kept or self.paused >= RETRY - 1:
            self.paused = 0
            return True
        self.paused += 1
        return False


class PausingSession:
    """A history a sequence, and the drafter's own session; see `DraftSession`."""

    def __init__(self, session: DraftSession, least_kept: float, num_sequences: int) -> None:
        self._session = session
        self._least_kept = least_kept
        self._histories: list[History] = []
        self._add(num_sequences)

    @property
    def lengths(self) -> list[int]:
        """Tokens in the drafter's own cache. Raises AttributeError where it has none."""
        lengths: list[int] = self._session.lengths  # type: ignore[attr-defined]
        return lengths

    def draft(self, sequences: ListLike[Sequence], lengths: ListLike[int]) -> list[DraftBlock]:
        wanted = []
        for history, sequence, length in zip(self._histories, sequences, lengths, strict=True):
            history.look(sequence.token_ids)
            wanted.append(length if length and history.begin_round() else 0)
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
        self._add(count)
        self._session.join(count)

    def _add(self, count: int) -> None:
        self._histories += [History(self._least_kept) for _ in range(count)]
