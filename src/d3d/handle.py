"""Handle of a running request: iterate or await its chunks, get its result, or cancel it."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator

from d3d.engine.engine import Engine
from d3d.engine.request import Request
from d3d.engine.round import Round
from d3d.results import GenerationResult, Recorder, StreamChunk

WAIT_S = 0.1
"""Longest wait for another thread's step, in seconds."""


class Stepper:
    """Steps an engine and hands its rounds to handles. All steppers of a model share the lock
    `turn`, since their engines share the target's cache."""

    def __init__(self, engine: Engine, turn: threading.Lock) -> None:
        self.engine = engine
        self._turn = turn
        self._handles: dict[int, Handle] = {}

    def add(self, handle: Handle) -> None:
        self._handles[handle.id] = handle
        self.engine.add(handle.request)

    def cancel(self, request: Request) -> None:
        self.engine.cancel(request)

    @property
    def has_work(self) -> bool:
        return self.engine.has_work

    def step(self) -> bool:
        """Advance all requests; False if there is nothing to do."""
        with self._turn:
            return self._step()

    def advance_until(self, is_done: Callable[[], bool]) -> None:
        """Step, or wait for another thread's step, until `is_done()` or there is no work."""
        while not is_done():
            if self._turn.acquire(timeout=WAIT_S):
                try:
                    if is_done() or not self._step():
                        return
                finally:
                    self._turn.release()

    def settle(self) -> None:
        """Release cancelled requests now; a step under way does so itself."""
        if self._turn.acquire(blocking=False):
            try:
                self.engine.drop_cancelled()
            finally:
                self._turn.release()

    def cancel_all(self) -> None:
        """Cancel all requests and release their state."""
        with self._turn:
            for handle in self._handles.values():
                self.engine.cancel(handle.request)
            self.engine.drop_cancelled()
            self._handles.clear()

    def _step(self) -> bool:
        if not self.engine.has_work:
            return False
        for round_ in self.engine.step():
            handle = self._handles.get(round_.request_id)
            if handle is not None:
                handle.take(round_)
        self._handles = {
            request_id: handle
            for request_id, handle in self._handles.items()
            if not handle.finished
        }
        return True


class Handle:
    """A request added by `Model.add`.

    Iterating, and `result`, step the engine unless another thread does. The last chunk of an answer
    that was not cancelled carries the result."""

    def __init__(self, request: Request, recorder: Recorder, stepper: Stepper) -> None:
        self.request = request
        self._recorder, self._stepper = recorder, stepper
        self._chunks: deque[StreamChunk] = deque()
        self._result: GenerationResult | None = None

    @property
    def id(self) -> int:
        return self.request.id

    @property
    def finished(self) -> bool:
        """True if the request has finished, failed or been cancelled."""
        return self.request.finished

    def take(self, round_: Round) -> None:
        """Take the request's next round; called by the thread that steps the engine."""
        chunk = self._recorder.add(round_)
        self._result = chunk.result
        self._chunks.append(chunk)

    def __iter__(self) -> Iterator[StreamChunk]:
        return self

    def __next__(self) -> StreamChunk:
        """Return the next chunk. Raises the error that the request failed with."""
        self._stepper.advance_until(lambda: bool(self._chunks) or self.finished)
        if self._chunks:
            return self._chunks.popleft()
        if self.request.error is not None:
            raise self.request.error
        raise StopIteration

    def __aiter__(self) -> AsyncIterator[StreamChunk]:
        return self._chunks_async()

    async def _chunks_async(self) -> AsyncIterator[StreamChunk]:
        while (chunk := await asyncio.to_thread(next, self, None)) is not None:
            yield chunk

    def taken(self) -> Iterator[StreamChunk]:
        """Yield the chunks that are ready, without stepping."""
        while self._chunks:
            yield self._chunks.popleft()

    def settle(self) -> None:
        """After `cancel`: release the request's state now; a step under way does so itself."""
        self._stepper.settle()

    def result(self) -> GenerationResult:
        """Return the whole answer, or the part that a cancelled request has. Raises the request's
        error."""
        self._stepper.advance_until(lambda: self.finished)
        if self.request.error is not None:
            raise self.request.error
        if self._result is None:
            self._result = self._recorder.result("cancelled")
        return self._result

    def cancel(self) -> None:
        """Leave before the next step. No effect on an ended request; safe from any thread."""
        self._stepper.cancel(self.request)
