"""What a drafter that stands around another one has in common with others of its kind: it passes on
what it does not change, and keeps something of its own for each sequence."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from collections.abc import Sequence as ListLike
from dataclasses import dataclass
from typing import Generic, TypeVar

from d3d.core.protocols import DraftSession, SelfDrafter, TargetSession
from d3d.core.sequence import Sequence
from d3d.core.types import DraftBlock

Own = TypeVar("Own")


@dataclass(frozen=True)
class Around(ABC):
    """A drafter that asks `drafter`, or does not."""

    drafter: SelfDrafter

    @property
    def block_size(self) -> int:
        return self.drafter.block_size

    def open(self, num_sequences: int, capacity: int) -> DraftSession:
        return self._around(self.drafter.open(num_sequences, capacity), num_sequences)

    def open_beside(self, target: TargetSession) -> DraftSession | None:
        session = self.drafter.open_beside(target)
        return None if session is None else self._around(session, len(target.lengths))

    @abstractmethod
    def _around(self, session: DraftSession, num_sequences: int) -> DraftSession: ...


class AroundSession(ABC, Generic[Own]):
    """The drafter's own session, and what `new` makes for each sequence; see `DraftSession`."""

    def __init__(self, session: DraftSession, new: Callable[[], Own], num_sequences: int) -> None:
        self._session = session
        self._new = new
        self._own = [new() for _ in range(num_sequences)]

    @property
    def lengths(self) -> list[int]:
        """Tokens in the drafter's own cache. Raises AttributeError where it has none."""
        lengths: list[int] = self._session.lengths  # type: ignore[attr-defined]
        return lengths

    @abstractmethod
    def draft(self, sequences: ListLike[Sequence], lengths: ListLike[int]) -> list[DraftBlock]: ...

    def keep(self, rows: list[int]) -> None:
        self._own = [self._own[row] for row in rows]
        self._session.keep(rows)

    def join(self, count: int) -> None:
        self._own += [self._new() for _ in range(count)]
        self._session.join(count)
