"""A drafter on disk: a self-contained directory that loads strictly or not at all.

config.json         model type, what the drafter is, its base by name and fingerprint, the tokenizer
by fingerprint model.safetensors   deltas and mask vector, or full weights, see `stored_tensors`;
the draft vocabulary where there is one decoder/            full weights only: the base's
config.json, so that they load without the base tokenizer files     to say what differs when it is
tried with another target provenance.json     how it was made and what it measured README.md
the same for people, as a hub shows it; nothing reads it"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors.torch import save_file
from torch import Tensor

from d3d.errors import D3DError, InvalidCheckpoint
from d3d.hub.fingerprint import first_difference, tokenizer_fingerprint
from d3d.hub.loading import DRAFTER_TYPE, WEIGHTS_FILE, load_config, load_tokenizer, read_tensors
from d3d.hub.model_card import CARD_FILE, Made, drafter_card
from d3d.hub.open_model import OpenModel, TargetModel, open_model
from d3d.hub.stored_tensors import SCALE, Storage, pack, unpack
from d3d.hub.tiny import tensor_shapes
from d3d.model.config import decoder_config
from d3d.model.drafter import DrafterConfig, DrafterModel
from d3d.model.from_target import from_target
from d3d.model.transformer import Transformer

FORMAT = 1
DECODER = "decoder"
DRAFT_IDS = "draft_token_ids"
"""int32 [draft_vocabulary]."""
HEAD_PREFIX = "previous_token_head."


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
    path: Path,
    model: DrafterModel,
    base: OpenModel,
    *,
    storage: Storage = "int8",
    provenance: dict[str, Any] | None = None,
    tensors: dict[str, Tensor] | None = None,
) -> None:
    """Write a checkpoint of a drafter that was made of `base`; an older one at `path` is replaced
    only when the new one is complete.

    `tensors`: what to store, where the model's own `trainable` is shared out among processes.
    Raises InvalidCheckpoint for a mask token that means something else."""
    check_mask_token(model.config, base)
    config = CheckpointConfig(
        drafter=model.config,
        base=BaseModelReference(source=base.source, fingerprint=base.fingerprint),
        tokenizer_fingerprint=tokenizer_fingerprint(base.tokenizer),
        storage=storage,
    )
    restore_interrupted(path)
    work = path.with_name(f".{path.name}.partial")
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    if model.config.delta is None:
        (work / DECODER).mkdir()
        shutil.copyfile(base.path / "config.json", work / DECODER / "config.json")
    base.tokenizer.save_pretrained(work)
    (work / "provenance.json").write_text(
        json.dumps(provenance or {}, indent=2) + "\n", encoding="utf-8"
    )
    card = drafter_card(Made(model.config, base.source, base.fingerprint, provenance or {}))
    (work / CARD_FILE).write_text(card, encoding="utf-8")
    (work / "config.json").write_text(config.model_dump_json(indent=2) + "\n", encoding="utf-8")
    stored: dict[str, Tensor] = {**(model.trainable() if tensors is None else tensors)}
    if model.draft_ids is not None:
        stored[DRAFT_IDS] = model.draft_ids
    save_file(pack(stored, storage), work / WEIGHTS_FILE)
    (work / WEIGHTS_FILE).chmod(
        (work / "config.json").stat().st_mode
    )  # safetensors' own is for the owner alone
    replace_directory(work, path)


def replace_directory(work: Path, path: Path) -> None:
    """Put a finished directory in the place of an older one; `restore_interrupted` mends what a
    kill in between leaves."""
    old = _set_aside(path)
    shutil.rmtree(old, ignore_errors=True)
    if path.exists():
        path.rename(old)
    work.rename(path)
    shutil.rmtree(old, ignore_errors=True)


def _set_aside(path: Path) -> Path:
    return path.with_name(f".{path.name}.old")


def restore_interrupted(path: Path) -> None:
    """Put the older directory back where `replace_directory` was killed between taking it away and
    putting the new one there."""
    if not path.exists() and _set_aside(path).is_dir():
        _set_aside(path).rename(path)


def load_drafter(path: Path, target: TargetModel) -> DrafterModel:
    """Load a drafter for a target, on its device and in its dtype; deltas over the target itself
    share its weights.

    Deltas over another model load that model, by the name in the config. Raises InvalidCheckpoint
    for what is not a d3d drafter, is damaged, has another tokenizer than the target, or whose base
    is not to be had."""
    config = read_config(path)
    _check_tokenizer(path, config, target)
    check_mask_token(config.drafter, target)
    model = from_target(_base(path, config, target), config.drafter)
    wanted = model.trainable()
    tensors = read_tensors(path)
    if config.drafter.draft_vocabulary is not None:
        if DRAFT_IDS not in tensors:
            raise InvalidCheckpoint(
                f"{path / WEIGHTS_FILE} lacks {DRAFT_IDS}; get the drafter again"
            )
        model.set_draft_ids(tensors.pop(DRAFT_IDS).long())
    stored = unpack(
        path / WEIGHTS_FILE, tensors, {name: parameter.shape for name, parameter in wanted.items()}
    )
    for name, parameter in wanted.items():
        parameter.data = stored[name].to(device=target.device, dtype=target.dtype, copy=True)
    return model.eval()


def start_from(path: Path, model: DrafterModel, base: OpenModel) -> None:
    """Give a new drafter of `base` the trained tensors of a checkpoint of the same base. What the
    checkpoint lacks stays new, and what has no place in the new drafter (a delta of a matrix that
    has none there) is left out.

    Raises InvalidCheckpoint where another model is its base, or what the two share means something
    else in each."""
    config = read_config(path)
    if config.base.fingerprint != base.fingerprint:
        raise InvalidCheckpoint(
            f"{path} is a drafter over {config.base.source}, whose weights are not those of {base.source}"
        )
    for name, found, wanted in _kinds(config.drafter, model.config):
        if found != wanted:
            raise InvalidCheckpoint(
                f"{path} can't be started from: its {name} is {found}, the new drafter's is {wanted}"
            )
    own = model.trainable()
    tensors = {
        name: tensor
        for name, tensor in read_tensors(path).items()
        if name.removesuffix(SCALE) in own
    }
    shapes = {
        name: _stored_shape(name, parameter.shape, config.drafter)
        for name, parameter in own.items()
        if name in tensors
    }
    stored = unpack(path / WEIGHTS_FILE, tensors, shapes)
    for name, tensor in stored.items():
        mine = own[name].data
        if (
            tensor.shape != mine.shape
        ):  # a lower rank, a narrower head: so many rows of what goes in, columns of what comes out
            mine[tuple(slice(length) for length in tensor.shape)] = tensor.to(
                mine.device, mine.dtype
            )
        else:
            own[name].data = tensor.to(mine.device, mine.dtype, copy=True)


def _stored_shape(name: str, shape: torch.Size, older: DrafterConfig) -> torch.Size:
    """The shape that a tensor of a new drafter has where the rank of its deltas and the width of
    its head are those of `older`."""
    inner = None
    if name.startswith(HEAD_PREFIX):
        inner = older.previous_token_width
    elif older.delta is not None and ".layers." in name and name.endswith((".down", ".up")):
        inner = older.delta.rank
    if inner is None:
        return shape
    return torch.Size((shape[0], inner) if name.endswith(".up") else (inner, shape[1]))


def _kinds(older: DrafterConfig, newer: DrafterConfig) -> Iterator[tuple[str, Any, Any]]:
    """What two drafters must have in common for the tensors of one to mean something in the
    other."""
    for name in ("kept_layers", "alignment", "mask_token_id"):
        yield name, getattr(older, name), getattr(newer, name)
    yield "delta", older.delta is not None, newer.delta is not None
    if older.delta is not None and newer.delta is not None:
        if older.delta.rank > newer.delta.rank:
            yield "delta.rank", older.delta.rank, newer.delta.rank
        yield "delta.scope", older.delta.scope, newer.delta.scope
    widths = older.previous_token_width, newer.previous_token_width
    if widths[0] is not None and widths[1] is not None and widths[0] > widths[1]:
        yield "previous_token_width", *widths


def read_config(path: Path) -> CheckpointConfig:
    """Raises InvalidCheckpoint that says what the directory is instead."""
    file = path / "config.json"
    if not file.is_file():
        raise InvalidCheckpoint(f"{path} is not a drafter: it holds no config.json")
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidCheckpoint(f"{file} is damaged: {error}") from error
    if not isinstance(content, dict) or content.get("model_type") != DRAFTER_TYPE:
        raise InvalidCheckpoint(
            f"{path} is not a d3d drafter but {_what_it_is(content)}; train one with `d3d train`"
        )
    if content.get("format") != FORMAT:
        raise InvalidCheckpoint(
            f"{file} has format {content.get('format')}, this version of d3d reads {FORMAT}; update d3d"
        )
    try:
        return CheckpointConfig.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        name, message = ".".join(map(str, first["loc"])), first["msg"].removeprefix("Value error, ")
        if first["type"] == "extra_forbidden":
            message = "this version of d3d knows no such key; update d3d"
        raise InvalidCheckpoint(f"{file}: {name}: {message}") from error


def read_provenance(path: Path) -> dict[str, Any]:
    """How the drafter in directory `path` was made; nothing where that was not kept. Raises
    InvalidCheckpoint for a damaged file."""
    file = path / "provenance.json"
    try:
        content = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    except ValueError as error:
        raise InvalidCheckpoint(f"{file} is damaged: {error}; get the drafter again") from error
    return content if isinstance(content, dict) else {}


def check_mask_token(config: DrafterConfig, model: TargetModel) -> None:
    """Raises InvalidCheckpoint where `mask_token_id` has no embedding row, or stands for something
    in a text already."""
    mask = config.mask_token_id
    if mask is None:
        return
    if mask >= model.vocab_size:
        raise InvalidCheckpoint(
            f"mask_token_id is {mask}, but {model.source} has embeddings for ids below {model.vocab_size}"
        )
    tokenizer = model.tokenizer
    for name, token_ids in (
        ("end-of-answer", model.eos_token_ids | {tokenizer.eos_token_id}),
        ("beginning-of-text", {tokenizer.bos_token_id}),
        ("padding", {tokenizer.pad_token_id}),
    ):
        if mask in token_ids:
            raise InvalidCheckpoint(
                f"mask_token_id is {mask}, the {name} token of {model.source}; take a row that no text uses, or none (a learned vector)"
            )


def _what_it_is(content: Any) -> str:
    if not isinstance(content, dict):
        return "something else"
    text = json.dumps(content).lower()
    for word, name in (
        ("dflash", "a DFlash drafter"),
        ("eagle", "an EAGLE drafter"),
        ("medusa", "a Medusa drafter"),
    ):
        if word in text:
            return f"{name}, which needs the target's hidden states"
    kind = content.get("model_type")
    return (
        f"a plain {kind} model" if kind else "something else (its config.json names no model_type)"
    )


def _check_tokenizer(path: Path, config: CheckpointConfig, target: TargetModel) -> None:
    if config.tokenizer_fingerprint == tokenizer_fingerprint(target.tokenizer):
        return
    difference = first_difference(load_tokenizer(path), target.tokenizer)
    if difference is not None:
        raise InvalidCheckpoint(
            f"the drafter {path} has another tokenizer than the target {target.source}: {difference}"
        )


def _base(path: Path, config: CheckpointConfig, target: TargetModel) -> Transformer:
    """The decoder that the drafter is made of; for full weights one of the right shape will do."""
    device, dtype = target.device, target.dtype
    if config.base.fingerprint == target.fingerprint:
        if isinstance(target, OpenModel):
            return target.transformer
        return open_model(
            str(target.path), device=str(device), dtype=str(dtype).removeprefix("torch.")
        ).transformer
    if config.drafter.delta is None:
        hf_config = load_config(path / DECODER)
        blank = {
            name: torch.zeros(shape, device=device, dtype=dtype)
            for name, shape in tensor_shapes(hf_config).items()
        }
        return Transformer(decoder_config(hf_config), blank).eval()
    source, fingerprint = config.base.source, config.base.fingerprint[:12]
    try:
        base = open_model(source, device=str(device), dtype=str(dtype).removeprefix("torch."))
    except D3DError as error:
        raise InvalidCheckpoint(
            f"the drafter {path} holds deltas over {source} (fingerprint {fingerprint}), which is neither the target {target.source} "
            f"(fingerprint {target.fingerprint[:12]}) nor to be had: {error}"
        ) from error
    if base.fingerprint != config.base.fingerprint:
        raise InvalidCheckpoint(
            f"the drafter {path} was made of other weights than {source} has now "
            f"(fingerprint {fingerprint}, found {base.fingerprint[:12]}); use the weights that it was made of, or train it again"
        )
    return base.transformer
