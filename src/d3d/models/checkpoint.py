"""A drafter on disk: a self-contained directory that loads strictly or not at all.

config.json         model type, what the drafter is, its base by fingerprint, the tokenizer by fingerprint
model.safetensors   deltas and mask vector, or full weights; int8 tensors have a float32 `NAME.scale` for each row
base.json           full weights only: the `transformers` config of the decoder
tokenizer files     to say what differs when it is tried with another target
provenance.json     how it was made and what it measured
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors.torch import save_file
from torch import Tensor

from d3d.core.errors import InvalidCheckpoint
from d3d.models.drafter import DrafterConfig, DrafterModel
from d3d.models.fingerprint import first_difference, tokenizer_fingerprint
from d3d.models.from_target import from_target
from d3d.models.loading import load_tokenizer, read_tensors
from d3d.models.open_model import OpenModel, open_model

MODEL_TYPE = "d3d_drafter"
FORMAT = 1
SCALE = ".scale"
Storage = Literal["int8", "float32"]


class BaseModelReference(BaseModel):
    """The model whose layers the drafter is made of."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    source: str
    fingerprint: str


class CheckpointConfig(BaseModel):
    """What config.json holds."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model_type: Literal["d3d_drafter"] = "d3d_drafter"
    format: Literal[1] = 1
    drafter: DrafterConfig
    base: BaseModelReference
    tokenizer_fingerprint: str
    storage: Storage


def save_drafter(
    path: Path, model: DrafterModel, base: OpenModel, *, storage: Storage = "int8", provenance: dict[str, Any] | None = None
) -> None:
    """Write a checkpoint; an older one at `path` is replaced only when the new one is complete."""
    config = CheckpointConfig(
        drafter=model.config,
        base=BaseModelReference(source=base.source, fingerprint=base.fingerprint),
        tokenizer_fingerprint=tokenizer_fingerprint(base.tokenizer),
        storage=storage,
    )
    work = path.with_name(f".{path.name}.partial")
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    tensors = {name: parameter.detach().float().cpu().contiguous() for name, parameter in model.trainable().items()}
    save_file(_quantise(tensors) if storage == "int8" else tensors, work / "model.safetensors")
    base.tokenizer.save_pretrained(work)
    (work / "provenance.json").write_text(json.dumps(provenance or {}, indent=2) + "\n", encoding="utf-8")
    (work / "config.json").write_text(config.model_dump_json(indent=2) + "\n", encoding="utf-8")
    old = path.with_name(f".{path.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if path.exists():
        path.rename(old)
    work.rename(path)
    shutil.rmtree(old, ignore_errors=True)


def load_drafter(path: Path, target: OpenModel) -> DrafterModel:
    """Load a drafter for a target, on its device and in its dtype; where the target is its base they share the weights.

    Raises InvalidCheckpoint for what is not a d3d drafter, is damaged, or belongs to another tokenizer or base.
    """
    config = read_config(path)
    _check_tokenizer(path, config, target)
    base = _base(path, config, target)
    model = from_target(base.transformer, config.drafter)
    stored = _dequantise(path, read_tensors(path)) if config.storage == "int8" else read_tensors(path)
    wanted = model.trainable()
    if odd := sorted(stored.keys() ^ wanted.keys()):
        missing = odd[0] in wanted
        raise InvalidCheckpoint(
            f"{path / 'model.safetensors'} {'lacks' if missing else 'holds'} {odd[0]}{'' if missing else ', which no such drafter has'}"
        )
    for name, parameter in wanted.items():
        if parameter.shape != stored[name].shape:
            raise InvalidCheckpoint(f"{path}: {name} has shape {tuple(stored[name].shape)}, the config says {tuple(parameter.shape)}")
        parameter.data = stored[name].to(device=base.transformer.device, dtype=base.transformer.dtype)
        parameter.requires_grad_(False)
    return model.eval()


def read_config(path: Path) -> CheckpointConfig:
    """Raises InvalidCheckpoint that says what the directory is instead."""
    file = path / "config.json"
    if not file.is_file():
        raise InvalidCheckpoint(f"{path} is not a drafter: it holds no config.json")
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InvalidCheckpoint(f"{file} is damaged: {error}") from error
    if not isinstance(content, dict) or content.get("model_type") != MODEL_TYPE:
        raise InvalidCheckpoint(f"{path} is not a d3d drafter but {_what_it_is(content)}; train one with `d3d train`")
    if content.get("format") != FORMAT:
        raise InvalidCheckpoint(f"{file} has format {content.get('format')}, this version of d3d reads {FORMAT}; update d3d")
    try:
        return CheckpointConfig.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        raise InvalidCheckpoint(f"{file}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from error


def _what_it_is(content: Any) -> str:
    if not isinstance(content, dict):
        return "something else"
    text = json.dumps(content).lower()
    for word, name in (("dflash", "a DFlash drafter"), ("eagle", "an EAGLE drafter"), ("medusa", "a Medusa drafter")):
        if word in text:
            return f"{name}, which needs the target's hidden states"
    return f"a plain {content.get('model_type', 'unknown')} model"


def _check_tokenizer(path: Path, config: CheckpointConfig, target: OpenModel) -> None:
    if config.tokenizer_fingerprint == tokenizer_fingerprint(target.tokenizer):
        return
    difference = first_difference(load_tokenizer(path), target.tokenizer)
    if difference is not None:
        raise InvalidCheckpoint(f"the drafter {path} has another tokenizer than the target {target.source}: {difference}")


def _base(path: Path, config: CheckpointConfig, target: OpenModel) -> OpenModel:
    if config.base.fingerprint == target.fingerprint:
        return target
    base = open_model(config.base.source, device=str(target.transformer.device), dtype=str(target.transformer.dtype).removeprefix("torch."))
    if base.fingerprint != config.base.fingerprint:
        raise InvalidCheckpoint(
            f"the drafter {path} was made of other weights than {config.base.source} has now "
            f"(fingerprint {config.base.fingerprint[:12]}, found {base.fingerprint[:12]})"
        )
    return base


def _quantise(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Matrices become int8 with one float32 scale a row (largest magnitude to 127); vectors stay."""
    out: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if tensor.dim() < 2:
            out[name] = tensor
            continue
        scale = tensor.abs().amax(1).clamp(min=1e-12) / 127
        out[name] = (tensor / scale[:, None]).round().to(torch.int8)
        out[name + SCALE] = scale
    return out


def _dequantise(path: Path, stored: dict[str, Tensor]) -> dict[str, Tensor]:
    out: dict[str, Tensor] = {}
    for name, tensor in stored.items():
        if name.endswith(SCALE):
            continue
        if tensor.dtype != torch.int8:
            out[name] = tensor
        elif name + SCALE not in stored:
            raise InvalidCheckpoint(f"{path / 'model.safetensors'} lacks {name + SCALE}")
        else:
            out[name] = tensor.float() * stored[name + SCALE][:, None]
    return out
