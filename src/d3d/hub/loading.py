"""From what a user names to the files of a model, and from the files to config, tokenizer and
tensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer, PretrainedConfig, PreTrainedTokenizerBase

from d3d.errors import InvalidCheckpoint
from d3d.hub.converted import converted_directory, is_converted
from d3d.hub.download import fetch
from d3d.hub.gguf_conversion import convert
from d3d.hub.names import fetch_snapshot, fetch_tokenizer, is_hub_id
from d3d.hub.preset_file import is_preset_file, read_preset
from d3d.hub.presets import PRESETS, Preset
from d3d.hub.quiet import first_line, quiet_transformers

INDEX_FILE = "model.safetensors.index.json"
WEIGHTS_FILE = "model.safetensors"
DRAFTER_TYPE = "d3d_drafter"
"""`model_type` in the config.json of a drafter checkpoint."""


def resolve_model(source: str) -> Path:
    """Local Hugging Face directory (config, tokenizer, safetensors) of a model.

    `source` is the name of a preset (its target), a directory, a preset file, a .gguf file, or a
    hub id `org/name[@revision]`, tried in this order; what is not there yet is fetched or
    converted, with progress on standard error. Raises InvalidCheckpoint."""
    if source in PRESETS:
        return _preset_target(PRESETS[source])
    path = Path(source).expanduser()
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
        f"no model {source!r}: it is no preset ({', '.join(sorted(PRESETS))}), no directory, no .gguf file, and no hub id (org/name)"
    )


def resolve_tokenizer(source: str) -> Path:
    """As `resolve_model`, but the directory need not hold the weights. Raises InvalidCheckpoint."""
    if is_preset_file(source):
        return resolve_tokenizer(read_preset(source).target)
    if source not in PRESETS and is_hub_id(source) and not Path(source).expanduser().exists():
        return fetch_tokenizer(source)
    return resolve_model(source)


def resolve_drafter(source: str) -> Path:
    """Local directory of a drafter checkpoint: a directory, a preset's own drafter (by name or
    file), or a hub id. Raises InvalidCheckpoint."""
    if source in PRESETS:
        return PRESETS[source].drafter_directory()
    path = Path(source).expanduser()
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
        f"no drafter {source!r}: it is no directory, no preset ({', '.join(sorted(PRESETS))}) and no hub id (org/name)"
    )


def drafter_of(source: str) -> Path | None:
    """The drafter that a target's name brings: a preset's, or a preset file's; None for other
    targets. Raises InvalidCheckpoint."""
    if source in PRESETS:
        return PRESETS[source].drafter_directory()
    if not is_preset_file(source) or Path(source).expanduser().is_dir():
        return None
    found = read_preset(source)
    return drafter_of(found.target) if found.drafter is None else resolve_drafter(found.drafter)


def _preset_target(preset: Preset) -> Path:
    directory = converted_directory(preset.target.stem, preset.target.sha256)
    if is_converted(directory, preset.target.sha256):
        return directory
    return convert(fetch(preset))


def _checked_directory(path: Path) -> Path:
    if not (path / "config.json").is_file():
        ggufs = sorted(path.glob("*.gguf"))
        hint = (
            f"; give the file itself: {ggufs[0]}"
            if ggufs
            else "; give the directory of a Hugging Face model"
        )
        raise InvalidCheckpoint(f"{path} holds no config.json{hint}")
    return path


def load_config(path: Path) -> PretrainedConfig:
    """The model's config. Raises InvalidCheckpoint where transformers can't read it."""
    if _read_json(path / "config.json").get("model_type") == DRAFTER_TYPE:
        raise InvalidCheckpoint(
            f"{path} is a d3d drafter, which can't be a target; give it as the drafter, and its target as the target"
        )
    try:
        with quiet_transformers():
            config: PretrainedConfig = AutoConfig.from_pretrained(path, local_files_only=True)
            return config
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InvalidCheckpoint(
            f"{path / 'config.json'} can't be read: {first_line(error)}"
        ) from error


def load_tokenizer(path: Path) -> PreTrainedTokenizerBase:
    """The model's tokenizer. Raises InvalidCheckpoint where it is missing or damaged."""
    try:
        with quiet_transformers():
            tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
                path, local_files_only=True
            )
    except Exception as error:  # the tokenizers library raises bare Exception for a damaged file
        raise InvalidCheckpoint(
            f"the tokenizer in {path} can't be read: {first_line(error)}; fetch the model again"
        ) from error
    if len(tokenizer) == 0:
        raise InvalidCheckpoint(
            f"{path} holds no tokenizer; copy the model's tokenizer files (tokenizer.json) there"
        )
    return tokenizer


def eos_token_ids(
    path: Path, config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase
) -> frozenset[int]:
    """Token ids that end an answer: those of generation_config.json and of the config; where these
    name none, the tokenizer's; maybe none at all."""
    generation = path / "generation_config.json"
    named = [
        getattr(config, "eos_token_id", None),
        _read_json(generation).get("eos_token_id") if generation.is_file() else None,
    ]
    ids: set[int] = set()
    for value in named:
        ids.update(value if isinstance(value, list) else [] if value is None else [value])
    if not ids and tokenizer.eos_token_id is not None:
        ids.add(tokenizer.eos_token_id)
    return frozenset(ids)


def read_tensors(path: Path) -> dict[str, Tensor]:
    """All tensors of a directory's safetensors files, by name, in the stored dtype.

    They are views of the mapped files: pages are read when they are used, and must not be written.
    Raises InvalidCheckpoint that names the file which is missing, cut short, or at odds with the
    index."""
    if not (path / INDEX_FILE).is_file():
        if not (path / WEIGHTS_FILE).is_file():
            raise InvalidCheckpoint(
                f"{path} holds neither {WEIGHTS_FILE} nor {INDEX_FILE}; only safetensors weights are supported"
            )
        return _read_file(path / WEIGHTS_FILE)
    weight_map = _read_json(path / INDEX_FILE).get("weight_map")
    if not isinstance(weight_map, dict):
        raise InvalidCheckpoint(f"{path / INDEX_FILE} has no weight_map; fetch the model again")
    tensors: dict[str, Tensor] = {}
    for shard in sorted(set(weight_map.values())):
        listed = {name for name, file in weight_map.items() if file == shard}
        found = _read_file(path / shard)
        if odd := sorted(listed ^ found.keys()):
            holder, lacking = (INDEX_FILE, shard) if odd[0] in listed else (shard, INDEX_FILE)
            raise InvalidCheckpoint(
                f"{path}: {holder} names {odd[0]}, which {lacking} lacks; fetch both files again"
            )
        tensors.update(found)
    return tensors


def _read_file(file: Path) -> dict[str, Tensor]:
    if not file.is_file():
        raise InvalidCheckpoint(f"the weights file {file} is missing; fetch the model again")
    try:
        with safe_open(file, framework="pt") as archive:
            return {name: archive.get_tensor(name) for name in archive.keys()}  # noqa: SIM118 - not a mapping
    except (SafetensorError, OSError, ValueError) as error:
        raise InvalidCheckpoint(
            f"the weights file {file} is damaged: {first_line(error)}; fetch it again"
        ) from error


def _read_json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidCheckpoint(
            f"{file} can't be read: {first_line(error)}; fetch it again"
        ) from error
    if not isinstance(content, dict):
        raise InvalidCheckpoint(f"{file} must hold a JSON object; fetch it again")
    return content
