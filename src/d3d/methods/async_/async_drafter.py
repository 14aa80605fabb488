"""Async mode behind the loop's Drafter protocol: a block is a successor out of the coordinator's
hands, or what the miss policy says."""

from __future__ import annotations

from collections.abc import Sequence as ListLike
from dataclasses import dataclass

from d3d.core.sequence import Sequence
from d3d.core.types import DraftBlock
from d3d.methods.async_.coordinator import Coordinator, Policy
from d3d.methods.async_.placement import TargetThreads


@dataclass(frozen=True)
class AsyncDrafter:
    """Drafts through a coordinator; many requests may share one."""

    coordinator: Coordinator
    policy: Policy
    threads: TargetThreads | None = None
    """Held while a session is open, so that the target leaves the worker's cores alone."""

    @property
    def block_size(self) -> int:
        return self.policy.draft_length

    def open(self, num_sequences: int, capacity: int) -> AsyncDraftSession:
        return AsyncDraftSession(self, num_sequences, capacity)


class AsyncDraftSession:
    """The sequences of one generation. It learns a verdict from the committed tokens that it is
    called with next."""

    def __init__(self, drafter: AsyncDrafter, num_sequences: int, capacity: int) -> None:
        self._coordinator = drafter.coordinator
        self._policy, self._capacity = drafter.policy, capacity
        self._sequence_ids: list[int] = []
        self.join(num_sequences)
        self._threads = drafter.threads
        if self._threads is not None:
            self._threads.hold()

    def draft(self, sequences: ListLike[Sequence], lengths: ListLike[int]) -> list[DraftBlock]:
        return self._coordinator.draft(
            self._sequence_ids, [sequence.token_ids for sequence in sequences], lengths
        )

    def keep(self, rows: list[int]) -> None:
        kept = [self._sequence_ids[row] for row in rows]
        for sequence_id in set(self._sequence_ids) - set(kept):
            self._coordinator.forget(sequence_id)
        self._sequence_ids = kept

    def join(self, count: int) -> None:
        self._sequence_ids += [
            self._coordinator.open(self._capacity, self._policy) for _ in range(count)
        ]

    def close(self) -> None:
        self.keep([])
        if self._threads is not None:
            self._threads.let_go()
            self._threads = None
