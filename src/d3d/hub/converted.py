"""Where conversions of GGUF files lie, and whether one is whole."""

from __future__ import annotations

import json
from pathlib import Path

from d3d.hub.cache import cache_root

FORMAT = 1
"""Raised when the conversion writes something else, so that old ones are made anew."""

MANIFEST = "d3d_source.json"


def converted_directory(name: str, sha256: str) -> Path:
    """Where the conversion of a GGUF file of this name (without suffix) and content lies."""
    return cache_root() / "converted" / f"{name}-{sha256[:12]}"


def is_converted(directory: Path, sha256: str) -> bool:
    """Whether the directory is a whole conversion of that content."""
    try:
        manifest = json.loads((directory / MANIFEST).read_text(encoding="utf-8"))
        return (
            manifest["format"] == FORMAT
            and manifest["sha256"] == sha256
            and all(
                (directory / name).stat().st_size == size
                for name, size in manifest["files"].items()
            )
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def write_manifest(directory: Path, source: Path, sha256: str) -> None:
    """Note what the directory's files, all written by now, were made of."""
    files = {file.name: file.stat().st_size for file in sorted(directory.iterdir())}
    manifest = {
        "format": FORMAT,
        "source": source.name,
        "sha256": sha256,
        "num_bytes": source.stat().st_size,
        "files": files,
    }
    (directory / MANIFEST).write_text(json.dumps(manifest, indent=2), encoding="utf-8")
