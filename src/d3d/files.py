"""Every output is opened here. Nothing is touched before it is known to be ours.

`FileKind` tells a file of ours from any other. `alone_in` and `alone_with` keep others out.
`write_whole`, `new_directory` and `replace_directory` write beside and rename; `Journal` appends
JSON lines. Whatever can't be written raises CantWrite, which says what is safe and how to go on."""

from __future__ import annotations

import errno
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from platform import node
from threading import get_ident
from typing import Any

from filelock import FileLock, Timeout

from d3d.errors import CantWrite, D3DError, InvalidRequest
from d3d.inputs import json_or_none

PARTIAL_SUFFIX = ".partial"
HEAD_BYTES = 4096
"""A marker must occur in the first bytes of a file."""
UNCHANGED = "nothing was changed; free some space, or choose another place, and run it again"
CONTINUED = "what is there stays whole; free some space and run it again, which goes on from there"
FAILED_WRITES = (
    "No space left",
    "os error",
    "I/O error",
    "PytorchStreamWriter",
    "inline_container",
)
"""Parts of messages by which libraries that write files say that they could not."""


@dataclass(frozen=True)
class FileKind:
    """A kind of file that d3d writes, and how to tell it from any other."""

    name: str
    """With its article, for messages."""
    keys: tuple[str, ...] = ()
    """Keys of its JSON object, the first one first; of JSON lines, that of the first line."""
    marker: str = ""
    """Text near its start, if it is not JSON."""
    test: Callable[[dict[str, Any]], bool] = lambda _: True
    """A further test of the JSON object."""

    def check(self, path: Path) -> None:
        """Raise InvalidRequest if there is something at `path` that is not of this kind.

        Nothing can be lost in an empty file or a device. A file that was torn by a kill or a full
        disk is of this kind if it starts like one."""
        try:
            if path.is_dir():
                raise InvalidRequest(f"{path} is a directory; name a file for {self.name}")
            ours = not path.is_file() or self._is_kind_of(path)
        except OSError as error:
            raise InvalidRequest(f"{path} can't be read: {error.strerror or error}") from error
        if not ours:
            self._refuse(path)

    def check_in(self, directory: Path, file: str) -> None:
        """Raise InvalidRequest for a directory that is neither empty nor holds `file` of this
        kind; `name` is then that of the directory."""
        if directory.exists() and not (directory / file).is_file():
            if not directory.is_dir() or any(directory.iterdir()):
                self._refuse(directory)
            return
        self.check(directory / file)

    def _refuse(self, path: Path) -> None:
        raise InvalidRequest(
            f"{path} exists and is not {self.name} written by d3d, so it was left as it is; move "
            "it away, or choose another name"
        )

    def _is_kind_of(self, path: Path) -> bool:
        with path.open("rb") as file:
            head = file.read(HEAD_BYTES)
            if not head or self.marker:
                return not head or self.marker.encode() in head
            file.seek(0)
            content = json_or_none(file.readline())
            if content is None:
                file.seek(0)
                content = json_or_none(file.read())
        if content is None:
            start, ours = "".join(head.decode("utf-8", "replace").split()), f'{{"{self.keys[0]}":'
            return start.startswith(ours) or ours.startswith(start)
        return isinstance(content, dict) and {*self.keys} <= {*content} and self.test(content)


class Alone:
    """Keeps other processes away from a place: from `hold` until `release`, in a `with` statement,
    or until the end of the process, however that ends."""

    def __init__(
        self, lock_file: Path, place: Path, what: str, *, wait: bool = False, safe: str = UNCHANGED
    ) -> None:
        """what: name of the work for messages. wait: wait for another process, and say so. safe: as
        for `explained`."""
        self._path, self._place, self._what = lock_file, place, what
        self._wait, self._safe = wait, safe
        self._lock = FileLock(lock_file, timeout=0)
        self._made_directory = False

    def hold(self) -> Alone:
        """Raises InvalidRequest that names the process if another one is at work there, CantWrite
        if nothing can be written there."""
        with explained(self._place, self._safe):
            self._made_directory = not self._path.parent.exists()
            self._path.parent.mkdir(parents=True, exist_ok=True)
            holder = self._holder()  # before a version of filelock that would empty the file
            try:
                self._lock.acquire()
            except Timeout as error:
                if not self._path.exists():  # not held, but impossible: raise the reason
                    os.close(os.open(self._path, os.O_WRONLY | os.O_CREAT))
                if not self._wait:
                    raise InvalidRequest(
                        f"another {self._what} is at work in {self._place}{holder}; wait for it, "
                        "or choose another name"
                    ) from error
                name = self._place.name
                print(f"d3d: waiting for another process that makes {name}", file=sys.stderr)
                self._lock.acquire(timeout=-1)
        with suppress(OSError):  # a full disk: the lock holds all the same
            since = datetime.now().astimezone().isoformat(" ", "seconds")
            self._path.write_text(f"process {os.getpid()} on {node()} since {since}", "utf-8")
        return self

    def _holder(self) -> str:
        with suppress(OSError):
            if text := self._path.read_text("utf-8", "replace"):
                return f" ({' '.join(text.split())})"
        return ""

    def release(self) -> None:
        """Let others work there. It may be called again."""
        if self._lock.is_locked:
            with suppress(OSError):
                self._path.unlink()  # while it is held: later it may be that of another process
            self._lock.release()
            if self._made_directory:
                with suppress(OSError):  # something was written
                    self._path.parent.rmdir()

    def __enter__(self) -> Alone:
        return self.hold()

    def __exit__(self, *_: object) -> None:
        self.release()


def alone_in(directory: Path, what: str) -> Alone:
    """Keeps others out of a directory, which is created if necessary."""
    return Alone(directory / ".lock", directory, what)


def alone_with(path: Path, what: str, *, wait: bool = False, safe: str = UNCHANGED) -> Alone:
    """Keeps others away from a file, or from a directory that is yet to be made."""
    if path.exists() and not path.is_file() and not path.is_dir():  # a device holds no state
        return Alone(Path(tempfile.gettempdir()) / f"d3d-{os.getpid()}.lock", path, what)
    return Alone(_beside(path.resolve(), ".lock"), path, what, wait=wait, safe=safe)


def _beside(path: Path, suffix: str) -> Path:
    return path.with_name(f".{path.name}{suffix}")


@contextmanager
def explained(path: Path, safe: str = UNCHANGED) -> Iterator[None]:
    """Turn the failure to write `path` into CantWrite. safe: what is safe, and how to go on."""
    try:
        yield
    except D3DError:
        raise
    except Exception as error:
        system = _system_error(error)
        if system is None and not any(words in str(error) for words in FAILED_WRITES):
            raise
        reason = "the disk is full, or failed" if system is None else system.strerror
        raise CantWrite(f"{path} can't be written: {reason}; {safe}") from error


def _system_error(error: BaseException | None) -> OSError | None:
    """The failed system call behind an error."""
    while error is not None and not (isinstance(error, OSError) and error.errno is not None):
        error = error.__context__
    return error


def write_whole(path: Path, kind: FileKind, content: str | bytes, safe: str = UNCHANGED) -> None:
    """Write a file such that no reader ever sees half of it, creating its directory. A link is
    kept, a device is written to. Raises InvalidRequest if a file of another kind is there,
    CantWrite if the file can't be written; what was there before is then unchanged."""
    kind.check(path)
    with explained(path, safe):
        path = path.resolve()
        if path.exists() and not os.access(path, os.W_OK):  # renaming would not mind
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        data = content.encode() if isinstance(content, str) else content
        if path.exists() and not path.is_file():
            path.write_bytes(data)
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        name = path.with_name(f".{path.name}.{os.getpid()}-{get_ident()}{PARTIAL_SUFFIX}")
        try:
            with name.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            if path.exists():
                os.chmod(name, path.stat().st_mode)
            os.replace(name, path)
        except BaseException:  # Ctrl-C, too
            with suppress(OSError):
                os.unlink(name)
            raise


@contextmanager
def new_directory(path: Path, safe: str = UNCHANGED) -> Iterator[Path]:
    """A directory to write to, which takes the place of `path` once everything is written; after an
    error nothing is left of it. The caller holds the place, and has checked it. Raises
    CantWrite."""
    work = _beside(path, PARTIAL_SUFFIX)
    with explained(path, safe):
        restore_interrupted(path)
        shutil.rmtree(work, ignore_errors=True)
        try:
            work.mkdir(parents=True)
            yield work
            replace_directory(work, path)
        except BaseException:  # Ctrl-C, too
            shutil.rmtree(work, ignore_errors=True)
            raise


def replace_directory(work: Path, path: Path) -> None:
    """Put a finished directory in the place of an older one; `restore_interrupted` repairs the
    state after a kill in between."""
    old = _beside(path, ".old")
    shutil.rmtree(old, ignore_errors=True)
    if path.exists():
        path.rename(old)
    work.rename(path)
    shutil.rmtree(old, ignore_errors=True)


def restore_interrupted(path: Path) -> None:
    """Put the older directory back if `replace_directory` was killed between its two renames."""
    old = _beside(path, ".old")
    if not path.exists() and old.is_dir():
        old.rename(path)


class Journal:
    """Append-only JSON lines. A line torn by a kill or a full disk is never read.

    A torn line is cut off before the next one is written, and the user is told. In a `shared`
    journal, to which other processes may be writing, it is terminated instead, and readers skip
    it."""

    def __init__(
        self, path: Path, kind: FileKind, *, shared: bool = False, permissions: int = 0o666
    ) -> None:
        """kind: of the file; another one is not written to. permissions: mode of a new file."""
        self.path, self._kind = path, kind
        self._shared, self._permissions = shared, permissions
        self._told = False

    def append(self, *lines: str) -> None:
        """Append lines (without line ends) in one write. Raises InvalidRequest if the file is of
        another kind, CantWrite if it can't be written, for instance if the disk is full."""
        if not lines:
            return
        self._kind.check(self.path)
        with explained(self.path, CONTINUED):
            file = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT, self._permissions)
            try:
                start = "" if self._ends_whole(file) else "\n"
                content = (start + "".join(f"{line}\n" for line in lines)).encode()
                if os.write(file, content) < len(content):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
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
        """Truncate after the last complete line and tell it; returns the size left, in bytes.
        Raises InvalidRequest if the file is of another kind."""
        if not self.path.is_file():
            return 0
        self._kind.check(self.path)
        with explained(self.path, CONTINUED), self.path.open("r+b") as file:
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
                self._tell_torn()
            return position

    def _tell_torn(self) -> None:
        if not self._told:
            print(
                f"d3d: {self.path}: its last line was torn by a kill or a full disk and is left "
                "out; the lines before it are whole",
                file=sys.stderr,
            )
        self._told = True

    def lines(self) -> Iterator[tuple[int, str]]:
        """Yield complete, non-empty lines with their numbers from 1; nothing if there is no file.
        Raises InvalidRequest if the file can't be read as UTF-8."""
        if not self.path.exists():
            return
        number = 0
        try:
            with self.path.open(encoding="utf-8-sig", newline="\n") as file:
                for number, line in enumerate(file, 1):
                    if not line.endswith("\n"):
                        self._tell_torn()
                    elif line.strip():
                        yield number, line
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidRequest(
                f"{self.path}, after line {number}: it can't be read ({error})"
            ) from error
