"""A drafter on disk: a self-contained directory that loads strictly or not at all.

- config.json: model type, the drafter's config, fingerprints of its base and its tokenizer
- model.safetensors: deltas and mask vector, or full weights (see `pack`), and the draft vocabulary
- decoder/: the base's config.json, for full weights only, so that they load without the base
- tokenizer files: to name the difference if it is tried with another target
- provenance.json: how the drafter was made, and its measurements
- README.md: model card for people; nothing reads it
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from d3d.errors import InvalidCheckpoint
from d3d.files import FileKind, new_directory
from d3d.hub.card import CARD_FILE, CardFacts, drafter_card
from d3d.hub.fingerprint import first_difference, tokenizer_fingerprint
from d3d.hub.open_model import (
    CONFIG_FILE,
    DRAFTER_TYPE,
    WEIGHTS_FILE,
    OpenModel,
    TargetModel,
    load_tokenizer,
)
from d3d.inputs import read_json, read_object, validated
from d3d.json_text import to_json
from d3d.model.drafter import DrafterConfig, DrafterModel

FORMAT = 1
DRAFTER = FileKind(
    "a drafter", ("model_type", "format"), test=lambda config: config["model_type"] == DRAFTER_TYPE
)
DECODER = "decoder"
PROVENANCE = "provenance.json"
DRAFT_IDS = "draft_token_ids"
"""Name of the draft vocabulary's tensor, int32 [draft_vocabulary]."""

SCALE = ".scale"
"""Added to a matrix's name, the name of its rows' scales."""

Storage = Literal["int8", "float32"]


class BaseModelReference(BaseModel):
    """The model whose layers a drafter is made of."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    source: str
    fingerprint: str


class CheckpointConfig(BaseModel):
    """Content of a checkpoint's config.json."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model_type: Literal["d3d_drafter"] = "d3d_drafter"
    format: Literal[1] = 1
    drafter: DrafterConfig
    base: BaseModelReference
    tokenizer_fingerprint: str
    storage: Storage


def save_drafter(
    path: Path,
    model: DrafterModel,
    base: OpenModel,
    *,
    storage: Storage = "int8",
    provenance: dict[str, Any] | None = None,
    tensors: dict[str, Tensor] | None = None,
) -> None:
    """Write a checkpoint of a drafter made of `base`. An older one at `path` is replaced only when
    the new one is complete.

    tensors: what to store if the model's own `trainable` tensors are sharded among processes.
    Raises InvalidCheckpoint if the mask token has another meaning."""
    check_mask_token(model.config, base)
    config = CheckpointConfig(
        drafter=model.config,
        base=BaseModelReference(source=base.source, fingerprint=base.fingerprint),
        tokenizer_fingerprint=tokenizer_fingerprint(base.tokenizer),
        storage=storage,
    )
    provenance = provenance or {}
    card = drafter_card(CardFacts(model.config, base.source, base.fingerprint, provenance))
    stored: dict[str, Tensor] = {**(model.trainable() if tensors is None else tensors)}
    if model.draft_ids is not None:
        stored[DRAFT_IDS] = model.draft_ids
    DRAFTER.check_in(path, CONFIG_FILE)
    with new_directory(path) as work:
        if model.config.delta is None:
            (work / DECODER).mkdir()
            shutil.copyfile(base.path / CONFIG_FILE, work / DECODER / CONFIG_FILE)
        base.tokenizer.save_pretrained(work)
        (work / PROVENANCE).write_text(to_json(provenance, indent=2) + "\n", encoding="utf-8")
        (work / CARD_FILE).write_text(card, encoding="utf-8")
        text = config.model_dump_json(indent=2) + "\n"
        (work / CONFIG_FILE).write_text(text, encoding="utf-8")
        save_file(pack(stored, storage), work / WEIGHTS_FILE)
        share_weights(work)


def share_weights(directory: Path) -> None:
    """Give weights the permissions of config.json; safetensors makes them private to the owner."""
    for file in directory.glob("*.safetensors"):
        file.chmod((directory / CONFIG_FILE).stat().st_mode)


def read_config(path: Path) -> CheckpointConfig:
    """Config of the checkpoint in a directory. Raises InvalidCheckpoint that says what the
    directory holds instead."""
    file = path / CONFIG_FILE
    if not file.is_file():
        raise InvalidCheckpoint(f"{path} is not a drafter: it holds no config.json")
    content = read_json(file, "get the drafter again", InvalidCheckpoint)
    if not isinstance(content, dict) or content.get("model_type") != DRAFTER_TYPE:
        raise InvalidCheckpoint(
            f"{path} is not a d3d drafter but {_describe(content)}; train one with `d3d train`"
        )
    if content.get("format") != FORMAT:
        raise InvalidCheckpoint(
            f"{file} has format {content.get('format')}, "
            f"this version of d3d reads {FORMAT}; update d3d"
        )
    advice = "if a newer d3d wrote it, update d3d"
    return validated(CheckpointConfig, content, file, advice, InvalidCheckpoint)


def is_causal_model(path: Path) -> bool:
    """True if a directory or GGUF file holds a plain causal model, by its config.json."""
    if path.is_file():
        return path.suffix == ".gguf"
    file = path / "config.json"
    if not file.is_file():
        return False
    content = read_json(file, kind=InvalidCheckpoint)
    is_ours = isinstance(content, dict) and content.get("model_type") == DRAFTER_TYPE
    return not is_ours and _describe(content).startswith("a plain")


def _describe(content: Any) -> str:
    """A foreign config.json in a few words."""
    if not isinstance(content, dict):
        return "something else"
    text = to_json(content).lower()
    for word, name in (
        ("dflash", "a DFlash drafter"),
        ("eagle", "an EAGLE drafter"),
        ("medusa", "a Medusa drafter"),
    ):
        if word in text:
            return f"{name}, which needs the target's hidden states"
    if kind := content.get("model_type"):
        return f"a plain {kind} model"
    return "something else (its config.json names no model_type)"


def read_provenance(path: Path) -> dict[str, Any]:
    """Provenance of the checkpoint in a directory, empty if it has none. Raises InvalidCheckpoint
    for a damaged file."""
    file = path / PROVENANCE
    if not file.is_file():
        return {}
    return read_object(file, "get the drafter again", InvalidCheckpoint)


def check_mask_token(config: DrafterConfig, model: TargetModel) -> None:
    """Raises InvalidCheckpoint if `mask_token_id` has no embedding row, or is a special token that
    texts use."""
    mask = config.mask_token_id
    if mask is None:
        return
    if mask >= model.vocab_size:
        raise InvalidCheckpoint(
            f"mask_token_id is {mask}, "
            f"but {model.source} has embeddings for ids below {model.vocab_size}"
        )
    tokenizer = model.tokenizer
    for name, token_ids in (
        ("end-of-answer", model.eos_token_ids | {tokenizer.eos_token_id}),
        ("beginning-of-text", {tokenizer.bos_token_id}),
        ("padding", {tokenizer.pad_token_id}),
    ):
        if mask in token_ids:
            raise InvalidCheckpoint(
                f"mask_token_id is {mask}, the {name} token of {model.source}; "
                "take a row that no text uses, or none (a learned vector)"
            )


def check_tokenizer(path: Path, tokenizer: PreTrainedTokenizerBase, target: str) -> None:
    """Raises InvalidCheckpoint, with the first difference, if the drafter at `path` has another
    tokenizer than the one of `target`."""
    if read_config(path).tokenizer_fingerprint == tokenizer_fingerprint(tokenizer):
        return
    difference = first_difference(load_tokenizer(path), tokenizer)
    if difference is not None:
        raise InvalidCheckpoint(
            f"the drafter {path} has another tokenizer than the target {target}: {difference}"
        )


def pack(tensors: dict[str, Tensor], storage: Storage) -> dict[str, Tensor]:
    """Tensors as they are written, on the CPU: integers as int32, floats as float32.

    With int8 storage a matrix [rows, columns] becomes int8, and NAME.scale gets a float32 scale
    [rows], each row's largest magnitude / 127; so a value is off by at most half a scale."""
    packed: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        dtype = torch.float32 if tensor.is_floating_point() else torch.int32
        stored = tensor.detach().to(dtype).cpu().contiguous()
        if storage == "int8" and stored.dim() > 1:
            scale = stored.abs().amax(1).clamp(min=1e-12) / 127
            stored = (stored / scale[:, None]).round().to(torch.int8)
            packed[name + SCALE] = scale
        packed[name] = stored
    return packed


def unpack(
    file: Path, stored: dict[str, Tensor], shapes: dict[str, torch.Size]
) -> dict[str, Tensor]:
    """Float tensors of these shapes from what `pack` made. `file` is for messages.

    Raises InvalidCheckpoint that names the first tensor that is missing, left over, or of the wrong
    shape or type."""
    rounded = {
        name for name, tensor in stored.items() if tensor.dtype == torch.int8 and name in shapes
    }
    wanted = shapes | {name + SCALE: shapes[name][:1] for name in rounded}
    for name in sorted(stored.keys() | wanted.keys()):
        tensor, shape = stored.get(name), wanted.get(name)
        if tensor is None:
            problem = f"lacks {name}"
        elif shape is None:
            problem = f"holds {name}, which no drafter of this config has"
        elif tensor.shape != shape:
            problem = f"holds {name} {tuple(tensor.shape)}, the config says {tuple(shape)}"
        elif not (tensor.is_floating_point() or (name in rounded and tensor.dim() > 1)):
            problem = f"holds {name} as {tensor.dtype}, which no drafter stores"
        else:
            continue
        raise InvalidCheckpoint(f"{file} {problem}; get the drafter again")
    return {
        name: stored[name].float() * stored[name + SCALE].float()[:, None]
        if name in rounded
        else stored[name]
        for name in shapes
    }
