"""Files that grow over hours: a lock for one process per directory, and append-only JSON lines."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from d3d.errors import InvalidRequest


@contextmanager
def alone_in(directory: Path, what: str) -> Iterator[None]:
    """Lock a directory, creating it if necessary. The lock is released if the process dies.

    what: name of the work for messages. Raises InvalidRequest if another process holds the lock."""
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


class Journal:
    """Append-only JSON lines. A line torn by a kill or a full disk is never read.

    A torn line is cut off before the next one is written. In a `shared` journal, to which other
    processes may be writing, it is terminated instead, and readers skip it."""

    def __init__(self, path: Path, *, shared: bool = False, permissions: int = 0o666) -> None:
        """permissions: mode of a new file."""
        self.path = path
        self._shared, self._permissions = shared, permissions

    def append(self, *lines: str) -> None:
        """Append lines (without line ends) in one write. Raises OSError, also if the disk is
        full."""
        if not lines:
            return
        file = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT, self._permissions)
        try:
            start = "" if self._ends_whole(file) else "\n"
            content = (start + "".join(f"{line}\n" for line in lines)).encode()
            if os.write(file, content) < len(content):
                raise OSError("the disk is full")
        finally:
            os.close(file)

    def _ends_whole(self, file: int) -> bool:
        """Cut a torn last line. Returns False if it is still there and must be terminated."""
        end = os.lseek(file, 0, os.SEEK_END)
        if not end or os.pread(file, 1, end - 1) == b"\n":
            return True
        if not self._shared:
            self.cut_torn_line()
        return not self._shared

    def cut_torn_line(self) -> int:
        """Truncate after the last complete line; returns the size left, in bytes."""
        if not self.path.is_file():
            return 0
        with self.path.open("r+b") as file:
            size = file.seek(0, os.SEEK_END)
            position = size
            while position:
                step = min(position, 1 << 16)
                position = file.seek(position - step)
                line_end = file.read(step).rfind(b"\n")
                if line_end >= 0:
                    position += line_end + 1
                    break
            if position < size:
                file.truncate(position)
            return position

    def lines(self) -> Iterator[tuple[int, str]]:
        """Yield complete, non-empty lines with their numbers from 1; nothing if there is no file.
        Raises InvalidRequest if the file can't be read as UTF-8."""
        if not self.path.exists():
            return
        number = 0
        try:
            with self.path.open(encoding="utf-8", newline="\n") as file:
                for number, line in enumerate(file, 1):
                    if line.endswith("\n") and line.strip():
                        yield number, line
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidRequest(
                f"{self.path}, after line {number}: it can't be read ({error})"
            ) from error
