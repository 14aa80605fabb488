"""Times the handover of a prepared successor: coordinator and worker, with a drafter that computes
nothing."""

from __future__ import annotations

import time
from collections.abc import Sequence

from d3d.engine.drafter import Draft
from d3d.errors import InvalidRequest
from d3d.methods.async_.coordinator import Coordinator, Policy
from d3d.methods.async_.outcomes import Outcome
from d3d.methods.async_.placement import PLACEMENTS, available_cores, worker_cores
from d3d.methods.async_.preparer import Preparer, PreparingSession, SuccessorDrafts
from d3d.methods.async_.worker_link import WorkerLink
from d3d.methods.async_.workers import ProcessWorker, ThreadWorker, Worker

SEQUENCE_ID = 0
DRAFT_LENGTH = 5
SLEEP_S = 0.003
"""Takes the place of a verification, during which the worker answers."""


class ConstantPreparer(Preparer):
    """Drafts zeros, and expects all of them to be kept and followed by a one."""

    def open(self, outcome_budget: int) -> ConstantSession:  # noqa: ARG002
        return ConstantSession()


class ConstantSession(PreparingSession):
    """Stateless."""

    def draft(self, text: list[int], draft_length: int) -> Draft:  # noqa: ARG002
        return Draft((0,) * draft_length)

    def likely_outcomes(self, text: list[int], draft: Sequence[int], budget: int) -> list[Outcome]:  # noqa: ARG002
        return [Outcome(len(draft), 1)]

    def prepare(
        self,
        text: list[int],
        draft: Sequence[int],  # noqa: ARG002
        outcomes: Sequence[Outcome],
        draft_length: int,
    ) -> SuccessorDrafts:
        return {outcome: self.draft(text, draft_length) for outcome in outcomes}


def handover_seconds(placement: str, rounds: int) -> list[float]:
    """For each hit: from the start of its round until the block is there and the worker has been
    asked for the next ones. All placements but processes use a thread. Raises InvalidRequest for an
    unknown placement, WorkerFailed if no worker comes up."""
    if placement not in PLACEMENTS:
        raise InvalidRequest(f"placement: {placement!r} is not one of {', '.join(PLACEMENTS)}")
    cores = worker_cores(available_cores())

    def launch() -> Worker:
        if placement == "processes":
            return ProcessWorker(ConstantPreparer, cores)
        return ThreadWorker(ConstantPreparer)

    coordinator = Coordinator(WorkerLink(launch, restarts=0, start_s=60))
    try:
        coordinator.ensure_worker()
        coordinator.open(SEQUENCE_ID, Policy(DRAFT_LENGTH, outcome_budget=1))
        text, seconds = [1], []
        for _ in range(rounds + 1):
            started = time.perf_counter()
            (block,) = coordinator.draft([SEQUENCE_ID], [text], [DRAFT_LENGTH])
            if block.preparation is not None and block.preparation.readiness == "hit":
                seconds.append(time.perf_counter() - started)
            text = [*text, *block.token_ids, 1]
            time.sleep(SLEEP_S)
        return seconds
    finally:
        coordinator.close()
