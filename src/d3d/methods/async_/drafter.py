"""Async mode's drafter: a draft is a prepared successor, or follows the miss policy."""

from __future__ import annotations

from collections.abc import Sequence

from d3d.engine.drafter import Draft, Drafter
from d3d.engine.request import Request
from d3d.methods.async_.coordinator import Coordinator, Policy
from d3d.methods.async_.placement import TargetThreads


class AsyncDrafter(Drafter):
    """Drafts through a coordinator, which several drafters may share. It learns a verdict from the
    committed tokens of the next round."""

    def __init__(
        self, coordinator: Coordinator, policy: Policy, threads: TargetThreads | None = None
    ) -> None:
        """threads: acquired while there are requests, to leave the worker's cores free."""
        self.max_draft_length = policy.draft_length
        self.coordinator, self.policy = coordinator, policy
        self._threads = threads
        self._ids: set[int] = set()
        """Ids of requests with a sequence in the coordinator."""

    def propose(self, requests: Sequence[Request]) -> list[Draft]:
        for request in requests:
            if request.id not in self._ids:
                self._open(request.id)
        return self.coordinator.draft(
            [request.id for request in requests],
            [request.token_ids for request in requests],
            [request.draft_room(self.max_draft_length) for request in requests],
        )

    def _open(self, request_id: int) -> None:
        if self._threads is not None and not self._ids:
            self._threads.acquire()
        self._ids.add(request_id)
        self.coordinator.open(request_id, self.policy)

    def ready(self) -> None:
        self.coordinator.ensure_worker()

    def num_missing(self, request: Request) -> int:
        return 0 if request.id in self._ids else len(request)

    def suspend(self, request: Request) -> None:
        self.end(request)

    def end(self, request: Request) -> None:
        if request.id not in self._ids:
            return
        self._ids.discard(request.id)
        self.coordinator.forget(request.id)
        if self._threads is not None and not self._ids:
            self._threads.release()

    def close(self) -> None:
        """Stop the worker, which other drafters of the coordinator may share; `ready` starts
        another."""
        self.coordinator.close()

    @property
    def num_held(self) -> int:
        return len(self._ids)
