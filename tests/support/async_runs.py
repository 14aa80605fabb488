"""Async mode on tiny targets: workers made of doubles, in a thread, in a process, or killed as
often as a test likes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from d3d.engine.drafter import Draft, Drafter, Target
from d3d.engine.engine import Engine
from d3d.engine.noise import uniform
from d3d.engine.request import Request
from d3d.engine.round import Preparation, Round
from d3d.engine.sampling import LogitRows
from d3d.methods.async_.coordinator import Coordinator, Policy
from d3d.methods.async_.drafter import AsyncDrafter
from d3d.methods.async_.preparer import Preparer
from d3d.methods.async_.worker_link import WorkerLink
from d3d.methods.async_.workers import ThreadWorker, Worker
from support.doubles import (
    PreparingDouble,
    foresees,
    misjudges,
    noisy,
    nothing_happens,
    oracle,
    sometimes,
)
from support.runs import Run, Watched

VOCAB = 97
Answers = list[list[int]]


class Crash(BaseException):
    """Ends a worker's thread as a kill ends a process: without a word."""


def rehearsed(
    answers: Answers,
    *,
    block_size: int = 8,
    wrong: float = 0.0,
    hits: float = 1.0,
    delay_s: float = 0.0,
    raising: float = 0.0,
    crashing: float = 0.0,
    hangs_at: int = -1,
    dies_at: int = -1,
    seed: int = 0,
) -> Preparer:
    """A double that drafts what comes, each token `wrong` with that probability, and knows the
    verdict with probability `hits`. Before a request it waits up to `delay_s`, raises or crashes
    with these probabilities, hangs at request `hangs_at`, ends its process at `dies_at`."""

    def before(number: int) -> None:
        if number == dies_at:
            os._exit(3)
        if number == hangs_at:
            time.sleep(3600)
        if delay_s:
            time.sleep(delay_s * uniform(seed, 3 * number))
        if uniform(seed + 1, number) < raising:
            raise RuntimeError("told to fail")
        if uniform(seed + 2, number) < crashing:
            raise Crash

    double = (
        noisy(wrong, seed, block_size, answers, VOCAB) if wrong else oracle(block_size, answers)
    )
    knows = foresees(answers)
    expect = sometimes(hits, seed, knows, misjudges(knows, VOCAB))
    quiet = not delay_s and not raising and not crashing and hangs_at < 0 and dies_at < 0
    return PreparingDouble(double, expect, nothing_happens if quiet else before)


def policy(draft_length: int = 8, outcome_budget: int = 4, **fields: Any) -> Policy:
    return Policy(draft_length, outcome_budget, **fields)


@contextmanager
def coordinating(
    make: Callable[[], Preparer],
    *,
    restarts: int = 0,
    launch: Callable[[], Worker] | None = None,
    start_s: float = 60.0,
) -> Iterator[Coordinator]:
    """A coordinator with its worker ready, in a thread unless it is launched otherwise."""
    coordinator = Coordinator(
        WorkerLink(launch or (lambda: ThreadWorker(make)), restarts=restarts, start_s=start_s)
    )
    try:
        coordinator.ensure_worker()
        yield coordinator
    finally:
        coordinator.close()


def async_drafter(coordinator: Coordinator, **fields: Any) -> AsyncDrafter:
    return AsyncDrafter(coordinator, policy(**fields))


def preparations(run: Run) -> list[Preparation]:
    """Of all rounds that wanted a draft."""
    return [round_.preparation for round_ in run.rounds if round_.preparation is not None]


def readiness(run: Run) -> list[str]:
    return [preparation.readiness for preparation in preparations(run)]


def causes(run: Run) -> list[str]:
    return [preparation.cause for preparation in preparations(run) if preparation.cause is not None]


def notes(run: Run) -> list[str]:
    return [note for preparation in preparations(run) for note in preparation.notes]


def decode(
    target: Target, drafter: Drafter | None, runs: Sequence[Run], max_batch: int | None = None
) -> Iterator[Round]:
    """Decode them together, round by round, while others may use the same drafter."""
    by_id = {run.request.id: run for run in runs}
    engine = Engine(target, drafter, max_batch=max_batch)
    for round_ in engine.run([run.request for run in runs]):
        by_id[round_.request_id].events.append(round_)
        yield round_


class Slow(Watched):
    """A target whose passes take at least so many seconds."""

    def __init__(self, target: Target, seconds: float) -> None:
        super().__init__(target)
        self._seconds = seconds

    def prefill(self, requests: Sequence[Request], num_rows: int) -> list[LogitRows | None]:
        self.wait()
        return super().prefill(requests, num_rows)

    def verify(self, requests: Sequence[Request], drafts: Sequence[Draft]) -> list[LogitRows]:
        self.wait()
        return super().verify(requests, drafts)

    def wait(self) -> None:
        time.sleep(self._seconds)


class Unhurried(Slow):
    """A target whose passes last until the worker has answered, for one sequence: whatever is
    prepared is there in time."""

    def __init__(self, target: Target, coordinator: Coordinator) -> None:
        super().__init__(target, 0.0)
        self._coordinator = coordinator

    def wait(self) -> None:
        deadline = time.monotonic() + 20
        while self._is_working() and time.monotonic() < deadline:
            time.sleep(0.0005)

    def _is_working(self) -> bool:
        worker = self._coordinator.link.worker
        sequences = self._coordinator._sequences.values()
        asked = any(sequence.pending is not None for sequence in sequences)
        return asked and worker is not None and worker.transport._incoming.empty()  # type: ignore[attr-defined]
