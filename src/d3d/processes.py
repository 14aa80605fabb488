"""Child processes that run one function in a fresh interpreter."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe

WATCH_S = 0.25
"""Seconds between a child's looks at its parent."""


class ChildProcess:
    """Runs a function in a fresh interpreter, which does not outlive this process.

    Unlike one that `multiprocessing` spawns, it does not run the program's main module again, so a
    script needs no guard against that, and may come from standard input. Needs a POSIX system."""

    def __init__(self, function: Callable[..., None], *arguments: object) -> None:
        """The child calls `function(connection, *arguments)`; they must be picklable, without the
        program's main module. Raises OSError if it can't be started."""
        self.connection, theirs = Pipe()
        # the modules that are found here, and none in the working directory
        paths = [os.path.abspath(path) for path in sys.path]
        try:
            with theirs:
                descriptor = theirs.fileno()
                body = f"from {__name__} import main; main({descriptor}, {os.getpid()})"
                self._child = subprocess.Popen(
                    [sys.executable, "-c", f"import sys; sys.path = {paths}; {body}"],
                    pass_fds=[descriptor],
                    stdin=subprocess.DEVNULL,
                )
            self.connection.send((function, arguments))
        except BaseException:
            self.connection.close()  # which ends the child
            raise

    @property
    def pid(self) -> int:
        return self._child.pid

    def is_alive(self) -> bool:
        return self._child.poll() is None

    def wait(self, timeout_s: float) -> None:
        """Wait for its end, up to a limit in seconds."""
        with suppress(subprocess.TimeoutExpired):
            self._child.wait(timeout_s)

    def kill(self) -> None:
        """End it, even in the middle of its work."""
        self._child.kill()
        self.wait(5.0)


def main(descriptor: int, parent: int) -> None:
    """Body of the child, which reads its function from an open socket and ends when its parent
    does."""
    # Ctrl-C is for the parent, which then ends this process
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with, args=(parent,), name="d3d-parent-watch", daemon=True).start()
    connection = Connection(descriptor)
    try:
        function, arguments = connection.recv()
    except EOFError:
        return
    function(connection, *arguments)


def _end_with(parent: int) -> None:
    """End this process when its parent has ended. The socket would not tell: processes that the
    parent has forked keep it open."""
    while os.getppid() == parent:
        time.sleep(WATCH_S)
    os._exit(1)
