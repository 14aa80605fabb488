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


class Turn:
    """Lets one thread step at a time, and wakes all waiting threads after each step."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._is_taken = False

    def take(self, unless: Callable[[], bool] = lambda: False) -> bool:
        """Wait for the turn and take it; False, without it, as soon as `unless()` is true."""
        with self._changed:
            self._changed.wait_for(lambda: unless() or not self._is_taken)
            if unless():
                return False
            self._is_taken = True
            return True

    def take_if_free(self) -> bool:
        with self._changed:
            if self._is_taken:
                return False
            self._is_taken = True
            return True

    def give_back(self) -> None:
        with self._changed:
            self._is_taken = False
            self._changed.notify_all()


class Stepper:
    """Steps an engine and hands its rounds to handles. All steppers of a model share one `turn`,
    since their engines share the target's cache."""

    def __init__(self, engine: Engine, turn: Turn) -> None:
        self.engine = engine
        self._turn = turn
        self._handles: dict[int, Handle] = {}
        """Other threads add to it during a step: never replace it, and loop over a copy only."""

    def add(self, handle: Handle) -> None:
        self._handles[handle.id] = handle
        self.engine.add(handle.request)

    def cancel(self, request: Request) -> None:
        self.engine.cancel(request)

    def step(self) -> list[Handle] | None:
        """Advance all requests. Returns the handles that got a chunk or an error; None if there was
        no work."""
        self._turn.take()
        try:
            return self._step()
        finally:
            self._turn.give_back()

    def advance_until(self, is_done: Callable[[], bool]) -> None:
        """Step, or wait for another thread's step, until `is_done()` or there is no work."""
        while self._turn.take(unless=is_done):
            try:
                if self._step() is None:
                    return
            finally:
                self._turn.give_back()

    def settle(self) -> None:
        """Release cancelled requests now; a step under way does so itself."""
        if self._turn.take_if_free():
            try:
                self.engine.drop_cancelled()
                self._drop_ended()
            finally:
                self._turn.give_back()

    def cancel_all(self) -> None:
        """Cancel all requests and release their state."""
        self._turn.take()
        try:
            for handle in list(self._handles.values()):
                self.engine.cancel(handle.request)
            self.engine.drop_cancelled()
            self._drop_ended()
        finally:
            self._turn.give_back()

    def _step(self) -> list[Handle] | None:
        if not self.engine.has_work:
            return None
        moved = []
        for round_ in self.engine.step():
            handle = self._handles.get(round_.request_id)
            if handle is not None:
                handle.take(round_)
                moved.append(handle)
        failed = [handle for handle in self._drop_ended() if handle.request.error is not None]
        return moved + failed

    def _drop_ended(self) -> list[Handle]:
        if len(self._handles) <= self.engine.num_open:
            return []
        ended = [handle for handle in list(self._handles.values()) if handle.finished]
        for handle in ended:
            del self._handles[handle.id]
        return ended


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
        """True if the request has finished, failed or been cancelled, and its last chunk is here;
        the engine ends a request before the handle gets that chunk."""
        request = self.request
        is_cut = request.finish_reason == "cancelled" or request.error is not None
        return is_cut or self._result is not None

    def take(self, round_: Round) -> None:
        """Take the request's next round; called by the thread that steps the engine."""
        chunk = self._recorder.add(round_)
        self._chunks.append(chunk)
        self._result = chunk.result  # last: another thread may look at `finished` meanwhile

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
