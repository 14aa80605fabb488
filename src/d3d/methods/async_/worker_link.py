"""The coordinator's connection to its worker: starts it, notices its end and replaces it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Literal

from d3d.errors import Disconnected
from d3d.methods.async_.messages import Failed, FromWorker, Ready, Stop, ToWorker
from d3d.methods.async_.workers import Worker

State = Literal["absent", "starting", "up"]
Launch = Callable[[], Worker]


CLOSING_S = 1.0
"""Time for a worker to end by itself once told to."""


class WorkerLink:
    """One worker at a time. A dead one is replaced in the background, at most `restarts` times
    between two calls of `begin`. It belongs to the process that started it: a forked process
    neither talks to it nor ends it."""

    def __init__(self, launch: Launch, *, restarts: int, start_s: float) -> None:
        """start_s: a worker that is not ready after so many seconds is given up."""
        self._launch = launch
        self._restarts, self._start_s = restarts, start_s
        self._restarts_left = restarts
        self._worker: Worker | None = None
        self._process = os.getpid()
        self._started = 0.0
        self.received_at = 0.0
        """Time of the last message."""
        self.state: State = "absent"
        self.generation = 0
        """Number of the worker; a new one has none of the old one's sequences."""
        self.cause = "absent"
        """Reason why no worker answers: absent, starting, dead, hung or broken; empty if one
        does."""
        self.notes: list[str] = []
        """Events of workers, as messages; the reader clears them."""

    @property
    def worker(self) -> Worker | None:
        return self._worker

    def begin(self) -> None:
        """Start a worker unless there is one, and allow all restarts again."""
        self._leave_to_parent()
        self._restarts_left = self._restarts
        if self.state == "absent":
            self._start()

    def send(self, message: ToWorker) -> bool:
        """Send a message; False if no worker is up to receive it."""
        self._leave_to_parent()
        if self._worker is None or self.state != "up":
            return False
        try:
            self._worker.transport.send(message)
        except Disconnected:
            self._end("dead", "died")
            return False
        return True

    def receive(self, timeout_s: float) -> FromWorker | None:
        """The next answer; None if none comes in time or there is no worker."""
        self._leave_to_parent()
        if self._worker is None:
            return None
        try:
            message = self._worker.transport.receive(timeout_s)
        except Disconnected:
            self._end("dead", "died")
            return None
        waited = time.perf_counter() - self._started
        if self.state == "starting" and message is None and waited > self._start_s:
            self._end("broken", f"was not ready after {self._start_s:g} s")
        if message is not None:
            self.received_at = time.perf_counter()
        if isinstance(message, Ready):
            self.state, self.cause = "up", ""
            return None
        if isinstance(message, Failed) and message.sequence_id is None:
            self._restarts_left = 0  # it would fail again
            self._end("broken", f"failed at its start: {message.error}")
            return None
        return message  # type: ignore[return-value]  # whatever a worker sends is one of these

    def end_hung(self, seconds: float) -> None:
        """End a worker that has been silent for this long, and replace it."""
        self._end("hung", f"did not answer for {seconds:g} s and was ended")

    def close(self) -> None:
        """End the worker; kill it only if it does not end when told to."""
        self._leave_to_parent()
        if self._worker is not None:
            if self.send(Stop()):
                self._worker.wait(CLOSING_S)
            if self._worker is not None:
                self._worker.kill()
        self._worker, self.state, self.cause = None, "absent", "absent"

    def _leave_to_parent(self) -> None:
        if self._process != os.getpid():
            self._process = os.getpid()
            self._worker, self.state, self.cause = None, "absent", "absent"

    def _end(self, cause: str, event: str) -> None:
        """Note a worker's end, make sure of it, and start another if restarts are left."""
        assert self._worker is not None
        self.notes.append(f"the {self._worker.description} {event}")
        self._worker.kill()
        self._worker, self.state, self.cause = None, "absent", cause
        if self._restarts_left > 0:
            self._restarts_left -= 1
            self._start()

    def _start(self) -> None:
        self.generation += 1
        try:
            self._worker = self._launch()
        except (OSError, RuntimeError) as error:  # no memory for a process or a thread
            self.notes.append(
                f"a draft worker could not be started: {type(error).__name__}: {error}"
            )
            self.state, self.cause = "absent", "broken"
            return
        self._started = time.perf_counter()
        self.state = "starting"
        if self.cause in ("", "absent"):  # else the last worker's end is still the reason
            self.cause = "starting"
