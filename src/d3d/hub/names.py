"""From the name of a model (preset, directory, preset file, GGUF file, hub id) to its files."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from huggingface_hub import snapshot_download

from d3d.errors import InvalidCheckpoint, InvalidRequest
from d3d.hub.download import fetch, find_conversion
from d3d.hub.gguf import convert
from d3d.hub.presets import PRESETS, SHIPPED, Preset, is_preset_file, preset_path, read_preset
from d3d.hub.terminal import first_line
from d3d.inputs import input_path, read_object

HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*(@[\w./-]+)?")
SMALL_FILES = ["*.json", "tokenizer*", "*.model", "*.jinja", "merges.txt", "vocab.txt"]


def resolve_model(source: str) -> Path:
    """Local Hugging Face directory (config, tokenizer, safetensors) of a model.

    `source` is tried as a preset (its target), a directory, a preset file, a .gguf file and a hub
    id `org/name[@revision]`, in this order; missing files are fetched or converted, with progress
    on standard error. Raises InvalidCheckpoint."""
    if source in PRESETS:
        return _preset_target(PRESETS[source])
    path = _path(source)
    if path.is_dir():
        return _checked_directory(path)
    if is_preset_file(source):
        return resolve_model(read_preset(source).target)
    if path.suffix.lower() == ".gguf":
        if not path.is_file():
            raise InvalidCheckpoint(f"there is no file {path}")
        return convert(path)
    if path.is_file():
        raise InvalidCheckpoint(
            f"{path} is neither a directory nor a .gguf file; give the model's directory"
        )
    if is_hub_id(source):
        return _checked_directory(fetch_snapshot(source))
    raise InvalidCheckpoint(
        f"no model {source!r}: it is neither a directory, a .gguf file nor a hub id (org/name), "
        f"and the presets are {_preset_names()}"
    )


def gguf_file(source: str) -> Path | None:
    """The GGUF file behind a model's name, fetched if necessary; None if the model is a Hugging
    Face directory. Raises InvalidCheckpoint."""
    if source in PRESETS:
        return fetch(PRESETS[source])
    path = _path(source)
    if not path.is_dir() and is_preset_file(source):
        return gguf_file(read_preset(source).target)
    return path if path.suffix.lower() == ".gguf" and path.is_file() else None


def resolve_tokenizer(source: str) -> Path:
    """Like `resolve_model`, but the directory may lack the weights. Raises InvalidCheckpoint."""
    if is_preset_file(source):
        return resolve_tokenizer(read_preset(source).target)
    if source not in PRESETS and is_hub_id(source) and not _path(source).exists():
        return fetch_tokenizer(source)
    return resolve_model(source)


def resolve_drafter(source: str) -> Path:
    """Local checkpoint directory of a drafter: a directory, the drafter of a preset (by name or
    file), or a hub id. Raises InvalidCheckpoint."""
    if source in PRESETS:
        return PRESETS[source].drafter_directory()
    path = _path(source)
    if path.is_dir():
        return path
    if is_preset_file(source):
        drafter = drafter_of(source)
        if drafter is None:
            raise InvalidCheckpoint(f"preset {source} names no drafter; name a checkpoint")
        return drafter
    if is_hub_id(source):
        return fetch_snapshot(source)
    raise InvalidCheckpoint(
        f"no drafter {source!r}: it is neither a directory nor a hub id (org/name), and the "
        f"presets are {_preset_names()}"
    )


def drafter_of(source: str) -> Path | None:
    """Checkpoint of the drafter that comes with a target's name, if that is a preset or a preset
    file; else None. Raises InvalidCheckpoint."""
    if source in PRESETS:
        return PRESETS[source].drafter_directory()
    if not is_preset_file(source) or _path(source).is_dir():
        return None
    preset = read_preset(source)
    return drafter_of(preset.target) if preset.drafter is None else resolve_drafter(preset.drafter)


def is_here(source: str) -> bool:
    """True if a model can be opened without fetching or converting anything."""
    if source in PRESETS:
        return find_conversion(PRESETS[source].target) is not None
    if is_preset_file(source) and preset_path(source).is_file():
        return is_here(read_preset(source).target)
    return _path(source).is_dir()


def _path(source: str) -> Path:
    return input_path(source, InvalidCheckpoint)


def _preset_target(preset: Preset) -> Path:
    return find_conversion(preset.target) or convert(fetch(preset))


def _preset_names() -> str:
    return ", ".join(sorted({*PRESETS, *SHIPPED}))


def _checked_directory(path: Path) -> Path:
    if not _has_config(path):
        ggufs = sorted(path.glob("*.gguf"))
        hint = f"file itself: {ggufs[0]}" if ggufs else "directory of a Hugging Face model"
        raise InvalidCheckpoint(f"{path} holds no config.json; give the {hint}")
    return path


def is_hub_id(source: str) -> bool:
    """True for names like `org/name` or `org/name@revision`."""
    return HUB_ID.fullmatch(source) is not None


def fetch_snapshot(source: str) -> Path:
    """Local directory of the hub model `org/name[@revision]`.

    A complete copy in the hub's own cache is used without asking the network; to get a newer one,
    name a revision or empty that cache. Raises InvalidCheckpoint if the model can't be had."""
    return _download(source, ["*.safetensors", *SMALL_FILES], _is_complete)


def fetch_config(source: str) -> Path:
    """Local directory with at least the config.json of a hub model. Raises InvalidCheckpoint."""
    return _download(source, ["config.json"], _has_config)


def fetch_tokenizer(source: str) -> Path:
    """Local directory with at least the tokenizer and config.json of a hub model. Raises
    InvalidCheckpoint."""
    return _download(source, SMALL_FILES, _has_tokenizer)


def _download(source: str, patterns: list[str], suffices: Callable[[Path], bool]) -> Path:
    name, _, tag = source.partition("@")
    revision = tag or None
    try:
        local = Path(snapshot_download(name, revision=revision, local_files_only=True))
        if suffices(local):
            return local
    except (OSError, ValueError):
        pass  # not in the hub's cache: ask the hub
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=patterns))
    except Exception as error:  # OSError, ValueError, and whatever the hub's HTTP client raises
        raise InvalidCheckpoint(
            f"could not get {source} from the hub, it is not in the hub's cache, and it is no "
            f"directory here: {first_line(error)}. Check the name, the network and, for a gated "
            "model, `hf auth login`"
        ) from error


def _has_config(directory: Path) -> bool:
    return (directory / "config.json").is_file()


def _has_tokenizer(directory: Path) -> bool:
    return _has_config(directory) and any(directory.glob("tokenizer*"))


def _is_complete(directory: Path) -> bool:
    if not _has_tokenizer(directory) or (directory / "model.safetensors").is_file():
        return _has_tokenizer(directory)
    try:
        index = read_object(directory / "model.safetensors.index.json")
        return all((directory / shard).is_file() for shard in index["weight_map"].values())
    except (InvalidRequest, OSError, KeyError, TypeError, AttributeError):
        return False
