"""The coordinator's view of its worker: is it there, why not, and start it again."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Literal

from d3d.errors import Disconnected
from d3d.methods.async_.messages import Failed, FromWorker, Ready, Stop, ToWorker
from d3d.methods.async_.workers import Worker

State = Literal["absent", "starting", "up"]
Launch = Callable[[], Worker]


CLOSING_S = 1.0
"""How long a worker may take to end when it is told to."""


class WorkerLink:
    """One worker at a time. A dead one is replaced in the background, `restarts` times between two
    calls of `begin`."""

    def __init__(self, launch: Launch, *, restarts: int, start_s: float) -> None:
        """start_s: a worker that is not ready after so many seconds is given up."""
        self._launch = launch
        self._restarts, self._start_s = restarts, start_s
        self._left = restarts
        self._worker: Worker | None = None
        self._started = 0.0
        self.heard_at = 0.0
        """When the last message came."""
        self.state: State = "absent"
        self.generation = 0
        """Counts the workers; a new one knows nothing of what the old one was told."""
        self.cause = "absent"
        """Why there is no worker that answers: absent, starting, dead, hung or broken."""
        self.notes: list[str] = []
        """What has happened to workers, for whoever reads them next."""

    @property
    def worker(self) -> Worker | None:
        return self._worker

    def begin(self) -> None:
        """Start a worker unless there is one, and allow it its restarts."""
        self._left = self._restarts
        if self.state == "absent":
            self._start()

    def send(self, message: ToWorker) -> bool:
        """Whether it is on its way."""
        if self._worker is None or self.state != "up":
            return False
        try:
            self._worker.transport.send(message)
        except Disconnected:
            self._lost("dead", "died")
            return False
        return True

    def receive(self, timeout_s: float) -> FromWorker | None:
        """The next answer; None when there is none within the time, or nobody to send one."""
        if self._worker is None:
            return None
        try:
            message = self._worker.transport.receive(timeout_s)
        except Disconnected:
            self._lost("dead", "died")
            return None
        if (
            self.state == "starting"
            and message is None
            and time.perf_counter() - self._started > self._start_s
        ):
            self._lost("broken", f"was not ready after {self._start_s:g} s")
        if message is not None:
            self.heard_at = time.perf_counter()
        if isinstance(message, Ready):
            self.state, self.cause = "up", ""
            return None
        if isinstance(message, Failed) and message.sequence_id is None:
            self._left = 0  # it would fail again
            self._lost("broken", f"failed at its start: {message.error}")
            return None
        return message  # type: ignore[return-value]  # whatever a worker sends is one of these

    def declare_hung(self, seconds: float) -> None:
        self._lost("hung", f"did not answer for {seconds:g} s and was ended")

    def close(self) -> None:
        """End the worker, gently where it listens."""
        if self._worker is not None:
            if self.send(Stop()):
                self._worker.wait(CLOSING_S)
            if self._worker is not None:
                self._worker.kill()
        self._worker, self.state, self.cause = None, "absent", "absent"

    def _lost(self, cause: str, what: str) -> None:
        assert self._worker is not None
        self.notes.append(f"the {self._worker.description} {what}")
        self._worker.kill()
        self._worker, self.state, self.cause = None, "absent", cause
        if self._left > 0:
            self._left -= 1
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
        if self.cause in ("", "absent"):  # else what ended the one before is still the reason
            self.cause = "starting"
