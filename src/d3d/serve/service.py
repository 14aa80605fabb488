"""One thread that steps the engine, and jobs through which HTTP handlers read answers."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, NamedTuple

from d3d.api import DEFAULT_BATCH, Model
from d3d.handle import Handle
from d3d.results import GenerationResult, StreamChunk
from d3d.serve.protocol import BadRequest

LOG = logging.getLogger("d3d.serve")

RETRY_AFTER_S = 2


class Ended(NamedTuple):
    """End of an answer that is not whole."""

    reason: str
    error: Exception | None = None


class AnswerFailed(Exception):  # reported inside a response, not on the command line
    """Answer that ended early: the target failed, or the server is stopping."""


class Job:
    """One answer under way. The stepping thread fills it, one task reads it."""

    def __init__(
        self, handle: Handle, loop: asyncio.AbstractEventLoop, on_leave: Callable[[], None]
    ) -> None:
        self.handle = handle
        self.added = time.perf_counter()
        self.result: GenerationResult | None = None
        self._loop, self._on_leave = loop, on_leave
        self._ready: asyncio.Queue[StreamChunk | Ended] = asyncio.Queue()
        self._has_ended = False

    @property
    def has_ended(self) -> bool:
        return self._has_ended

    def collect(self, observe: Callable[[Job, Sequence[StreamChunk]], None]) -> None:
        """Pass on what the last step gave; called by the stepping thread. observe: called before
        the reader sees it, so that no figure lags behind an answer."""
        items: list[StreamChunk | Ended] = []
        items += (chunks := list(self.handle.taken()))
        if chunks and chunks[-1].result is not None:
            self.result = chunks[-1].result
            self._has_ended = True
        elif self.handle.finished and not self._has_ended:
            self._has_ended = True
            error = self.handle.request.error
            items.append(Ended("it was cancelled" if error is None else str(error), error))
        try:
            if items:
                observe(self, chunks)
        finally:
            for item in items:
                self._put(item)

    def end(self, reason: str, error: Exception | None = None) -> None:
        """End the answer early."""
        if not self._has_ended:
            self._has_ended = True
            self._put(Ended(reason, error))

    def _put(self, item: StreamChunk | Ended) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._ready.put_nowait, item)

    async def chunks(self) -> AsyncIterator[StreamChunk]:
        """Yield chunks as they come, to the last one. Raises AnswerFailed if the answer ends
        early."""
        while True:
            item = await self._ready.get()
            if isinstance(item, Ended):
                raise AnswerFailed(item.reason) from item.error
            yield item
            if item.result is not None:
                return

    def leave(self) -> None:
        """Cancel an answer that is not whole, since nobody reads it any more."""
        if not self._has_ended:
            self.handle.cancel()
            self._on_leave()


class Service:
    """Answers requests with a model. `add` may be called from any thread."""

    def __init__(
        self,
        model: Model,
        options: dict[str, Any],
        *,
        max_batch: int = DEFAULT_BATCH,
        max_waiting: int = 64,
        observe: Callable[[Job, Sequence[StreamChunk]], None],
    ) -> None:
        """options: speculation options of every request. max_waiting: requests beyond `max_batch`
        that may wait. observe: called after each step, for each job that moved or ended."""
        self.model, self.options = model, options
        self.max_batch, self.max_waiting = max_batch, max_waiting
        self._observe = observe
        self._jobs: list[Job] = []
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._drain_by: float | None = None
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run, name="d3d-engine", daemon=True)
        model.max_batch = max_batch

    def start(self) -> None:
        """Build the method and start the thread. Raises InvalidRequest, WorkerFailed."""
        self.model.built(self.model.config(**self.options))
        self._thread.start()

    @property
    def is_ready(self) -> bool:
        return self._thread.is_alive() and self._drain_by is None and not self._is_stopping

    @property
    def num_open(self) -> int:
        return len(self._jobs)

    @property
    def num_running(self) -> int:
        return min(self.num_open, self.max_batch)

    @property
    def num_waiting(self) -> int:
        return max(0, self.num_open - self.max_batch)

    def add(
        self, prompts: Sequence[tuple[list[int], dict[str, Any]]], loop: asyncio.AbstractEventLoop
    ) -> list[Job]:
        """Start the answers of one HTTP request. Raises BadRequest if there is no room for all of
        them or the server is stopping, and InvalidRequest for impossible ones."""
        with self._lock:
            self._check_room(len(prompts))
            jobs: list[Job] = []
            try:
                for token_ids, sampling in prompts:
                    handle = self.model.add(token_ids, **sampling, **self.options)
                    jobs.append(Job(handle, loop, self._wake.set))
            except BaseException:
                for job in jobs:
                    job.handle.cancel()
                raise
            self._jobs += jobs
        self._wake.set()
        return jobs

    def _check_room(self, count: int) -> None:
        if not self.is_ready:
            raise BadRequest(
                "the server is stopping", status=503, kind="server_error", code="stopping"
            )
        if count > self.max_batch + self.max_waiting:
            raise BadRequest(
                f"{count} answers in one request are more than this server takes, "
                f"{self.max_batch + self.max_waiting}"
            )
        if self.num_open + count > self.max_batch + self.max_waiting:
            raise BadRequest(
                f"{self.num_open} requests are under way or waiting; try again",
                status=429,
                kind="rate_limit_error",
                code="queue_full",
                retry_after_s=RETRY_AFTER_S,
            )

    def drain(self, seconds: float) -> None:
        """Take no more requests; end answers that are not whole in so many seconds."""
        if self._drain_by is None:
            self._drain_by = time.monotonic() + seconds
            self._wake.set()

    def stop(self) -> None:
        """End all answers and the thread, and close the model."""
        self._is_stopping = True
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join()
        self._end_all("the server is stopping")
        self.model.close()

    def _run(self) -> None:
        try:
            self._step_on()
        finally:  # whatever ended the thread: nobody waits for answers that never come
            self._is_stopping = True
            self._end_all("the server is stopping")

    def _step_on(self) -> None:
        while not self._is_stopping:
            self._wake.clear()
            try:
                has_moved = self.model.step()
            except Exception:  # answers in that pass are cancelled; the others go on
                LOG.exception("a step failed")
                has_moved = True
            self._collect()
            if self._drain_by is not None and time.monotonic() > self._drain_by:
                self._end_all("the server is stopping")
            if not has_moved and not self._is_stopping:
                self._wake.wait(None if self._drain_by is None else 0.1)

    def _collect(self) -> None:
        with self._lock:
            jobs = list(self._jobs)
        for job in jobs:
            job.collect(self._observe)
        with self._lock:
            self._jobs = [job for job in self._jobs if not job.has_ended]

    def _end_all(self, reason: str) -> None:
        with self._lock:
            jobs, self._jobs = self._jobs, []
        for job in jobs:
            job.end(reason)
            job.handle.cancel()
            self._observe(job, ())
