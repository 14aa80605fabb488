"""Async mode's drafter: a draft is a successor out of the coordinator's hands, or what the miss
policy says."""

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
        """threads: held while there are requests, so that the target leaves the worker's cores
        alone."""
        self.max_draft_length = policy.draft_length
        self.coordinator, self.policy = coordinator, policy
        self._threads = threads
        self._members: set[int] = set()

    def propose(self, requests: Sequence[Request]) -> list[Draft]:
        for request in requests:
            if request.id not in self._members:
                self._join(request)
        return self.coordinator.draft(
            [request.id for request in requests],
            [request.token_ids for request in requests],
            [request.draft_room(self.max_draft_length) for request in requests],
        )

    def _join(self, request: Request) -> None:
        if self._threads is not None and not self._members:
            self._threads.hold()
        self._members.add(request.id)
        self.coordinator.open(request.id, self.policy)

    def ready(self) -> None:
        self.coordinator.ensure_worker()

    def num_missing(self, request: Request) -> int:
        return 0 if request.id in self._members else len(request)

    def suspend(self, request: Request) -> None:
        self.end(request)

    def end(self, request: Request) -> None:
        if request.id not in self._members:
            return
        self._members.discard(request.id)
        self.coordinator.forget(request.id)
        if self._threads is not None and not self._members:
            self._threads.let_go()

    @property
    def num_held(self) -> int:
        return len(self._members)
