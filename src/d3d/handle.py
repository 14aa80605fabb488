"""Handle of a running request: iterate or await its chunks, get its result, or cancel it."""

from __future__ import annotations

import asyncio
import os
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator

from d3d.engine.engine import Engine
from d3d.engine.request import Request
from d3d.engine.round import Round
from d3d.errors import InvalidRequest
from d3d.results import GenerationResult, Recorder, StreamChunk


class Turn:
    """Lets one thread at a time use a model's target and drafters, and wakes all waiting threads
    when it is given back.

    A process that is forked meanwhile has neither the threads of the model, nor its locks as they
    should be, so the turn is refused there."""

    def __init__(self) -> None:
        self._process = os.getpid()
        self._changed = threading.Condition()
        self._is_taken = False
        self._unsettled: deque[Stepper] = deque()

    def __enter__(self) -> None:
        self.take()

    def __exit__(self, *_: object) -> None:
        self.give_back()

    def take(self, unless: Callable[[], bool] = lambda: False) -> bool:
        """Wait for the turn and take it; False, without it, as soon as `unless()` is true. Raises
        InvalidRequest in a forked process."""
        self.check_process()
        with self._changed:
            self._changed.wait_for(lambda: unless() or not self._is_taken)
            if unless():
                return False
            self._is_taken = True
            return True

    @property
    def is_here(self) -> bool:
        """False in a process that was forked from the model's."""
        return os.getpid() == self._process

    def check_process(self) -> None:
        """Raises InvalidRequest in a forked process."""
        if not self.is_here:
            raise InvalidRequest(
                "this model was loaded before this process was forked, and can't be used here: "
                "load it after the fork, or start processes with multiprocessing's spawn"
            )

    def give_back(self) -> None:
        self._release()
        self._settle_all()

    def settle(self, stepper: Stepper) -> None:
        """Let a stepper release cancelled requests, now or when the turn is given back. Never
        waits, since the garbage collector may call it during a step."""
        self._unsettled.append(stepper)
        self._settle_all()

    def _settle_all(self) -> None:
        while self._unsettled and self.is_here and self._take_if_free():
            try:
                while self._unsettled:
                    self._unsettled.popleft().drop_cancelled()
            finally:
                self._release()

    def _take_if_free(self) -> bool:
        with self._changed:
            if self._is_taken:
                return False
            self._is_taken = True
            return True

    def _release(self) -> None:
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
        with self._turn:
            return self._step()

    def advance_until(self, is_done: Callable[[], bool]) -> None:
        """Step, or wait for another thread's step, until `is_done()` or there is no work."""
        while self._turn.take(unless=is_done):
            try:
                if self._step() is None:
                    return
            finally:
                self._turn.give_back()

    def settle(self) -> None:
        """Release cancelled requests now, or when the step under way ends."""
        self._turn.settle(self)

    def cancel_all(self) -> None:
        """Cancel all requests; `settle` or `drop_cancelled` releases their state."""
        for handle in list(self._handles.values()):
            self.engine.cancel(handle.request)

    def drop_cancelled(self) -> None:
        """Release cancelled requests. The caller holds the turn."""
        self.engine.drop_cancelled()
        self._drop_ended()

    def _step(self) -> list[Handle] | None:
        if not self.engine.has_work:
            return None
        try:
            rounds = self.engine.step()
        except BaseException:  # such as Ctrl-C: a request in the midst of a pass can't go on
            for request in (*self.engine.reading, *self.engine.running):
                self.engine.cancel(request)
            self.drop_cancelled()
            raise
        moved = []
        for round_ in rounds:
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
        while (chunk := self._next_ready()) is None:
            if self._is_read:
                raise StopIteration
            self._advance()
        return chunk

    def __aiter__(self) -> AsyncIterator[StreamChunk]:
        return self._chunks_async()

    async def _chunks_async(self) -> AsyncIterator[StreamChunk]:
        # a chunk is removed only when it is there, so cancelling the waiting task loses none
        while True:
            while (chunk := self._next_ready()) is not None:
                yield chunk
            if self._is_read:
                return
            await asyncio.to_thread(self._advance)

    def taken(self) -> Iterator[StreamChunk]:
        """Yield the chunks that are ready, without stepping."""
        while (chunk := self._next_ready()) is not None:
            yield chunk

    def _advance(self) -> None:
        """Step until a chunk is ready or none will come."""
        self._stepper.advance_until(lambda: bool(self._chunks) or self.finished)

    def _next_ready(self) -> StreamChunk | None:
        try:
            return self._chunks.popleft()
        except IndexError:  # another reader may have taken it
            return None

    @property
    def _is_read(self) -> bool:
        """True if nothing is left to read. Raises the error that the request failed with."""
        if not self.finished or self._chunks:
            return False
        if self.request.error is not None:
            raise self.request.error
        return True

    def settle(self) -> None:
        """After `cancel`: release the request's state now, or when the step under way ends."""
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
