"""The cache of fetched and converted models, which several processes may share."""

from __future__ import annotations

import glob
import hashlib
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from d3d.errors import CantWrite, InvalidRequest
from d3d.files import FileKind, alone_with, explained, write_whole
from d3d.inputs import read_object
from d3d.json_text import to_json

PARTIAL_SUFFIX = ".part"
"""Ends the name of everything that is not complete yet."""

CONVERSION_FORMAT = 2
"""Raised when the GGUF conversion writes something else, so that old conversions are redone."""

MANIFEST = "d3d_source.json"

HASH = FileKind("a remembered hash", ("path", "stamp", "sha256"))


def cache_root() -> Path:
    """`$D3D_CACHE`, or `~/.cache/d3d`."""
    return Path(os.environ.get("D3D_CACHE") or "~/.cache/d3d").expanduser()


def file_sha256(path: Path) -> str:
    """Hex sha256 of a file.

    Hashing takes about 0.3 s per 100 MB, so the digest is remembered in the cache for as long as
    the file's size and modification time (ns) stay the same."""
    path = path.resolve()
    status = path.stat()
    stamp = [status.st_size, status.st_mtime_ns]
    memo = cache_root() / "hashes" / f"{hashlib.sha256(str(path).encode()).hexdigest()[:32]}.json"
    try:
        remembered = read_object(memo)
        if remembered["stamp"] == stamp:
            return str(remembered["sha256"])
    except (InvalidRequest, KeyError):
        pass  # not hashed before, or an unreadable note: hash it
    digest = hash_content(path)
    with suppress(CantWrite, InvalidRequest):  # an unwritable cache only costs time
        write_whole(memo, HASH, to_json({"path": str(path), "stamp": stamp, "sha256": digest}))
    return digest


def hash_content(path: Path) -> str:
    """Hex sha256, always computed from the file itself."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 22):
            digest.update(chunk)
    return digest.hexdigest()


@contextmanager
def making(target: Path) -> Iterator[Path]:
    """Let one process at a time make `target`, a file or a directory of the cache.

    Yields an empty directory beside it (so that a rename is atomic), which is removed at the end
    together with the leftovers of killed processes. Other processes wait, say so, and must check
    first if `target` exists by then. Raises CantWrite if the cache can't be written."""
    safe = "free some space there, or set D3D_CACHE to another directory"
    with explained(target, safe), alone_with(target, "d3d", wait=True, safe=safe):
        for leftover in target.parent.glob(f"{glob.escape(target.name)}.*{PARTIAL_SUFFIX}"):
            shutil.rmtree(leftover, ignore_errors=True)
        work = Path(tempfile.mkdtemp(PARTIAL_SUFFIX, f"{target.name}.", target.parent))
        try:
            yield work
        finally:
            shutil.rmtree(work, ignore_errors=True)


def set_aside(path: Path, why: str) -> None:
    """Rename a file or directory of the cache that is not what d3d puts there: it may be the
    user's, so it is not deleted."""
    aside = Path(tempfile.mkdtemp(".damaged", f"{path.name}.", path.parent)) / path.name
    path.rename(aside)
    print(f"d3d: {path} {why}; it is now {aside}", file=sys.stderr)


def converted_directory(name: str, sha256: str) -> Path:
    """Directory for the conversion of a GGUF file with this name (no suffix) and content."""
    return cache_root() / "converted" / f"{name}-{sha256[:12]}"


def is_converted(directory: Path, sha256: str) -> bool:
    """True if the directory is a complete conversion of that content."""
    try:
        manifest = read_object(directory / MANIFEST)
        return (manifest["format"], manifest["sha256"]) == (CONVERSION_FORMAT, sha256) and all(
            (directory / name).stat().st_size == size for name, size in manifest["files"].items()
        )
    except (InvalidRequest, OSError, KeyError, TypeError, AttributeError):
        return False


def write_manifest(directory: Path, source: Path, sha256: str) -> None:
    """Record the source of a conversion, once all of its files are written."""
    manifest = {
        "format": CONVERSION_FORMAT,
        "source": source.name,
        "sha256": sha256,
        "num_bytes": source.stat().st_size,
        "files": {file.name: file.stat().st_size for file in sorted(directory.iterdir())},
    }
    (directory / MANIFEST).write_text(to_json(manifest, indent=2), encoding="utf-8")
