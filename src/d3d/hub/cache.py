"""Where fetched and converted models lie, and how several processes share that place without
harm."""

from __future__ import annotations

import glob
import hashlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from d3d.errors import InvalidCheckpoint

PARTIAL_SUFFIX = ".part"
"""Ends the name of everything that is not complete yet."""


def cache_root() -> Path:
    """`$D3D_CACHE`, or `~/.cache/d3d`."""
    return Path(os.environ.get("D3D_CACHE") or "~/.cache/d3d").expanduser()


def file_sha256(path: Path) -> str:
    """Hex digest of the file's content.

    Hashing takes about 0.3 s per 100 MB, so the digest is remembered in the cache, and holds while
    the file's size and modification time (ns) stay the same."""
    path = path.resolve()
    status = path.stat()
    stamp = [status.st_size, status.st_mtime_ns]
    memo = cache_root() / "hashes" / f"{hashlib.sha256(str(path).encode()).hexdigest()[:32]}.json"
    try:
        remembered = json.loads(memo.read_text())
        if remembered["stamp"] == stamp:
            return str(remembered["sha256"])
    except (OSError, ValueError, KeyError, TypeError):
        pass  # not hashed before, or an unreadable note: hash it
    digest = hash_content(path)
    with suppress(OSError):  # a cache that can't be written costs time only
        write_atomically(memo, json.dumps({"path": str(path), "stamp": stamp, "sha256": digest}))
    return digest


def hash_content(path: Path) -> str:
    """Hex sha256, always read from the file."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 22):
            digest.update(chunk)
    return digest.hexdigest()


def write_atomically(path: Path, text: str) -> None:
    """Write a small file so that nobody ever reads half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, partial = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=PARTIAL_SUFFIX)
    with os.fdopen(handle, "w") as file:
        file.write(text)
    os.replace(partial, path)


@contextmanager
def making(target: Path) -> Iterator[Path]:
    """Let one process at a time make `target`, a file or a directory of the cache.

    Yields an empty directory beside it (so that a rename is atomic), which is removed at the end,
    with whatever processes that were killed here have left. Other processes wait, say so, and must
    look first whether `target` has been made. Raises InvalidCheckpoint where the cache can't be
    written."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _lock(target):
            for leftover in target.parent.glob(f"{glob.escape(target.name)}.*{PARTIAL_SUFFIX}"):
                shutil.rmtree(leftover, ignore_errors=True)
            directory = Path(
                tempfile.mkdtemp(dir=target.parent, prefix=f"{target.name}.", suffix=PARTIAL_SUFFIX)
            )
            try:
                yield directory
            finally:
                shutil.rmtree(directory, ignore_errors=True)
    except OSError as error:
        raise InvalidCheckpoint(
            f"can't make {target}: {error}; free some space there, or set D3D_CACHE to another directory"
        ) from error


@contextmanager
def _lock(target: Path) -> Iterator[None]:
    lock = FileLock(target.parent / f".{target.name}.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        print(f"d3d: waiting for another process that makes {target.name}", file=sys.stderr)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()
