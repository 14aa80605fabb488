"""Models of a hub, by their id."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

from huggingface_hub import snapshot_download

from d3d.errors import InvalidCheckpoint
from d3d.hub.quiet import first_line

HUB_ID = re.compile(r"^(?P<name>[\w.-]+/[\w.-]+)(@(?P<revision>[\w./-]+))?$")

WANTED_FILES = [
    "*.safetensors",
    "*.safetensors.index.json",
    "*.json",
    "tokenizer*",
    "*.model",
    "*.jinja",
    "merges.txt",
    "vocab.txt",
]


def is_hub_id(source: str) -> bool:
    """Whether it reads like `org/name` or `org/name@revision`."""
    return HUB_ID.match(source) is not None


def fetch_snapshot(source: str) -> Path:
    """Local directory of the hub model `org/name[@revision]`.

    What lies whole in the hub's own cache is used without asking the network; give a revision, or
    empty that cache, to get a newer one. Raises InvalidCheckpoint where the model is neither there
    nor to be had."""
    return _download(source, WANTED_FILES, _is_whole)


def fetch_config(source: str) -> Path:
    """Local directory that holds at least the config.json of a hub model. Raises
    InvalidCheckpoint."""
    return _download(
        source, ["config.json"], lambda directory: (directory / "config.json").is_file()
    )


def fetch_tokenizer(source: str) -> Path:
    """Local directory that holds at least the tokenizer and config.json of a hub model. Raises
    InvalidCheckpoint."""
    wanted = [pattern for pattern in WANTED_FILES if "safetensors" not in pattern]
    return _download(
        source,
        wanted,
        lambda directory: (
            (directory / "config.json").is_file() and any(directory.glob("tokenizer*"))
        ),
    )


def _download(source: str, patterns: list[str], suffices: Callable[[Path], bool]) -> Path:
    match = HUB_ID.match(source)
    if match is None:
        raise InvalidCheckpoint(
            f"{source!r} is not a hub id; write it as org/name or org/name@revision"
        )
    name, revision = match["name"], match["revision"]
    try:
        local = Path(snapshot_download(name, revision=revision, local_files_only=True))
        if suffices(local):
            return local
    except (OSError, ValueError):
        pass  # not in the hub's cache: ask the hub
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=patterns))
    except Exception as error:  # the hub's own errors are OSErrors or ValueErrors, those of its HTTP client neither
        raise InvalidCheckpoint(
            f"could not get {source} from the hub, and it is not in the hub's cache: {first_line(error)}. "
            f"Check the name, the network and, for a gated model, `hf auth login`"
        ) from error


def _is_whole(directory: Path) -> bool:
    if not (directory / "config.json").is_file() or not any(directory.glob("tokenizer*")):
        return False
    if (directory / "model.safetensors").is_file():
        return True
    try:
        weight_map = json.loads(
            (directory / "model.safetensors.index.json").read_text(encoding="utf-8")
        )["weight_map"]
        return all((directory / shard).is_file() for shard in weight_map.values())
    except (OSError, ValueError, KeyError, AttributeError):
        return False
