"""A request under way, as its owner sees it: chunks to iterate or await, a result, a way to
cancel."""

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
"""Longest wait for another thread's step before looking again."""


class Stepper:
    """An engine, its handles, and whose turn it is. All of a model's steppers share one `turn`, as
    their engines share the target's cache."""

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
        """Step, or wait while another thread does, until it is so, or there is nothing to do."""
        while not is_done():
            if self._turn.acquire(timeout=WAIT_S):
                try:
                    if is_done() or not self._step():
                        return
                finally:
                    self._turn.release()

    def settle(self) -> None:
        """Let go of cancelled requests now, unless a step is under way, which does it itself."""
        if self._turn.acquire(blocking=False):
            try:
                self.engine.drop_cancelled()
            finally:
                self._turn.release()

    def cancel_all(self) -> None:
        """Cancel every request and let go of its state."""
        with self._turn:
            for handle in self._handles.values():
                self.engine.cancel(handle.request)
            self.engine.drop_cancelled()
            self._handles.clear()

    def _step(self) -> bool:
        if not self.engine.has_work:
            return False
        for one in self.engine.step():
            handle = self._handles.get(one.request_id)
            if handle is not None:
                handle.take(one)
        self._handles = {
            request_id: handle
            for request_id, handle in self._handles.items()
            if not handle.finished
        }
        return True


class Handle:
    """What `Model.add` returns.

    Iterating a handle steps the engine, unless another thread does; so does `result`. The last
    chunk of an answer that was not cancelled carries the result."""

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
        """Whether the request has ended: finished, cancelled or failed."""
        return self.request.finished

    def take(self, one: Round) -> None:
        """Called by whoever steps the engine, with the request's next round."""
        chunk = self._recorder.add(one)
        self._result = chunk.result
        self._chunks.append(chunk)

    def __iter__(self) -> Iterator[StreamChunk]:
        return self

    def __next__(self) -> StreamChunk:
        """The next chunk. Raises what the request failed of."""
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
        """Chunks that are there already; steps nothing."""
        while self._chunks:
            yield self._chunks.popleft()

    def settle(self) -> None:
        """After `cancel`: let go of the request's state now, unless a step is under way."""
        self._stepper.settle()

    def result(self) -> GenerationResult:
        """The whole answer, or what a cancelled request has of it. Raises what it failed of."""
        self._stepper.advance_until(lambda: self.finished)
        if self.request.error is not None:
            raise self.request.error
        if self._result is None:
            self._result = self._recorder.result("cancelled")
        return self._result

    def cancel(self) -> None:
        """Leave before the next step. Harmless if it has ended; may be called from any thread."""
        self._stepper.cancel(self.request)
