"""Async mode on tiny targets: workers made of doubles, in a thread, in a process, or killed as
often as a test likes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from d3d.engine.drafter import Target
from d3d.engine.round import Preparation
from d3d.engine.sampling import uniform
from d3d.methods.async_.async_drafter import AsyncDrafter
from d3d.methods.async_.coordinator import Coordinator, Policy
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
from support.runs import Run

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
    return [stats.preparation for stats in run.rounds if stats.preparation is not None]


def readiness(run: Run) -> list[str]:
    return [preparation.readiness for preparation in preparations(run)]


def causes(run: Run) -> list[str]:
    return [preparation.cause for preparation in preparations(run) if preparation.cause is not None]


def notes(run: Run) -> list[str]:
    return [note for preparation in preparations(run) for note in preparation.notes]


class Slow:
    """A target engine whose passes take at least so many seconds."""

    def __init__(self, engine: Target, seconds: float) -> None:
        self._engine, self._seconds = engine, seconds

    @property
    def vocab_size(self) -> int:
        return self._engine.vocab_size

    @property
    def max_length(self) -> int:
        return self._engine.max_length

    def open(self, num_sequences: int, capacity: int) -> Target:
        session = self._engine.open(num_sequences, capacity)
        forward = session.forward

        def slow_forward(token_ids: list[list[int]], *, last_only: bool = False) -> list[Tensor]:
            self.wait()
            return forward(token_ids, last_only=last_only)

        session.forward = slow_forward  # type: ignore[method-assign]
        return session

    def wait(self) -> None:
        time.sleep(self._seconds)


class Unhurried(Slow):
    """A target engine whose passes last until the worker has answered, for one sequence: whatever
    is prepared is there in time."""

    def __init__(self, engine: Target, coordinator: Coordinator) -> None:
        super().__init__(engine, 0.0)
        self._coordinator = coordinator

    def wait(self) -> None:
        deadline = time.monotonic() + 20
        while self._is_working() and time.monotonic() < deadline:
            time.sleep(0.0005)

    def _is_working(self) -> bool:
        worker = self._coordinator.link.worker
        asked = any(member.pending is not None for member in self._coordinator._members.values())
        return asked and worker is not None and worker.transport._incoming.empty()  # type: ignore[attr-defined]
