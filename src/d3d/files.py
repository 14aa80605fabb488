"""One process at a time in a directory that is written to over hours."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from d3d.errors import InvalidRequest


@contextmanager
def alone_in(directory: Path, what: str) -> Iterator[None]:
    """Hold the directory, which is made where it is missing; a process that dies lets it go.
    `what`: who works here, for a reader.

    Raises InvalidRequest where another process holds it.
    """
    directory.mkdir(parents=True, exist_ok=True)
    lock = FileLock(directory / ".lock", timeout=0)
    try:
        lock.acquire()
    except Timeout as error:
        raise InvalidRequest(
            f"another {what} is at work in {directory}; wait for it, or name another directory"
        ) from error
    try:
        yield
    finally:
        lock.release()
