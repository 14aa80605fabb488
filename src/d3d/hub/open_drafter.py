"""Open a drafter's checkpoint: for a target, as the start of a new drafter, or ready to decode."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from d3d.errors import D3DError, InvalidCheckpoint
from d3d.hub.checkpoint import (
    DECODER,
    DRAFT_IDS,
    SCALE,
    BaseModelReference,
    CheckpointConfig,
    check_mask_token,
    check_tokenizer,
    read_config,
    unpack,
)
from d3d.hub.open_model import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    OpenModel,
    TargetModel,
    blank_transformer,
    load_config,
    open_model,
    read_tensors,
)
from d3d.inputs import within
from d3d.model.drafter import DrafterConfig, DrafterModel
from d3d.model.from_target import from_target
from d3d.model.linear import pack_weights
from d3d.model.transformer import Transformer

HEAD_PREFIX = "previous_token_head."


def load_drafter(path: Path, target: TargetModel) -> DrafterModel:
    """Load a drafter for a target, on its device and in its dtype.

    Deltas over the target share its weights; deltas over another model load that model, by the name
    in the config. Raises InvalidCheckpoint if this is not a d3d drafter, is damaged, has another
    tokenizer than the target, or if its base can't be had."""
    config = read_config(path)
    check_tokenizer(path, target.tokenizer, target.source)
    with within(path / CONFIG_FILE):
        check_mask_token(config.drafter, target)
    model = from_target(_base(path, config, target), config.drafter)
    tensors, file = read_tensors(path), path / WEIGHTS_FILE
    if config.drafter.draft_vocabulary is not None:
        if DRAFT_IDS not in tensors:
            raise InvalidCheckpoint(f"{file} lacks {DRAFT_IDS}; get the drafter again")
        model.set_draft_ids(tensors.pop(DRAFT_IDS).long())
    parameters = model.trainable()
    shapes = {name: parameter.shape for name, parameter in parameters.items()}
    for name, tensor in unpack(file, tensors, shapes).items():
        parameters[name].data = tensor.to(device=target.device, dtype=target.dtype, copy=True)
    return model.eval()


def ready_drafters(target: OpenModel, paths: Sequence[Path]) -> list[DrafterModel]:
    """Load drafters, then pack their weights and the target's, so that all are ready to decode.

    Call it once for a target: drafters are loaded over weights that are not packed yet. Raises
    InvalidCheckpoint."""
    drafters = [load_drafter(path, target) for path in paths]
    for drafter in drafters:
        drafter.prepare_to_draft()
    pack_weights(target.transformer, *drafters, quantize=target.quantize)
    return drafters


def ready_apart(target: TargetModel, path: Path, quantize: str | None = None) -> DrafterModel:
    """Load a drafter whose target decodes elsewhere (in another process or engine, or on another
    device), and pack its own weights only. Raises InvalidCheckpoint."""
    drafter = load_drafter(path, target)
    drafter.prepare_to_draft()
    pack_weights(drafter, quantize=quantize)
    return drafter


def _base(path: Path, config: CheckpointConfig, target: TargetModel) -> Transformer:
    """The decoder that the drafter is made of; for full weights, any decoder of its shape."""
    device, dtype = target.device, target.dtype
    names = {"device": str(device), "dtype": str(dtype).removeprefix("torch.")}
    if config.base.fingerprint == target.fingerprint:
        if isinstance(target, OpenModel):
            return target.transformer
        return open_model(str(target.path), **names).transformer
    if config.drafter.delta is None:
        return blank_transformer(load_config(path / DECODER), device, dtype, target.num_tokens)
    hint = f"they are not over the target {target.source} ({target.fingerprint[:12]}) either"
    return open_base(path, config.base, hint, **names).transformer


def open_base(path: Path, base: BaseModelReference, hint: str, **options: str) -> OpenModel:
    """Open by name the model that the deltas of the drafter at `path` belong to.

    hint: ends the message if it can't be had. options: `device` and `dtype` of `open_model`. Raises
    InvalidCheckpoint."""
    text = f"the drafter {path} holds deltas over {base.source} ({base.fingerprint[:12]})"
    try:
        model = open_model(base.source, **options)
    except D3DError as error:
        raise InvalidCheckpoint(f"{text}, which can't be opened: {error}; {hint}") from error
    if model.fingerprint != base.fingerprint:
        raise InvalidCheckpoint(
            f"{text}, which has other weights now ({model.fingerprint[:12]}); {hint}"
        )
    return model


def start_from(path: Path, model: DrafterModel, base: OpenModel) -> None:
    """Copy the trained tensors of a checkpoint over `base` into a new drafter of `base`.

    Tensors that the checkpoint lacks stay new, and those that the new drafter lacks are left out.
    Raises InvalidCheckpoint if the checkpoint has another base, or if shared tensors mean something
    else in the new drafter."""
    config = read_config(path)
    if config.base.fingerprint != base.fingerprint:
        raise InvalidCheckpoint(
            f"{path} is a drafter over {config.base.source}, "
            f"whose weights are not those of {base.source}"
        )
    for name, older, newer in _conflicts(config.drafter, model.config):
        raise InvalidCheckpoint(
            f"{path} can't be started from: its {name} is {older}, the new drafter's is {newer}"
        )
    parameters, tensors = model.trainable(), read_tensors(path)
    tensors = {name: t for name, t in tensors.items() if name.removesuffix(SCALE) in parameters}
    shapes = {
        name: _older_shape(name, parameter.shape, config.drafter)
        for name, parameter in parameters.items()
        if name in tensors
    }
    for name, tensor in unpack(path / WEIGHTS_FILE, tensors, shapes).items():
        new = parameters[name].data
        stored = tensor.to(new.device, new.dtype, copy=True)
        if stored.shape == new.shape:
            parameters[name].data = stored
        else:  # a lower rank or a narrower head fills the first rows or columns
            new[tuple(slice(length) for length in stored.shape)] = stored


def _older_shape(name: str, shape: torch.Size, older: DrafterConfig) -> torch.Size:
    """Shape of a new drafter's tensor at the older one's delta rank and head width."""
    inner = None
    if name.startswith(HEAD_PREFIX):
        inner = older.previous_token_width
    elif older.delta is not None and ".layers." in name and name.endswith((".down", ".up")):
        inner = older.delta.rank
    if inner is None:
        return shape
    return torch.Size((shape[0], inner) if name.endswith(".up") else (inner, shape[1]))


def _conflicts(older: DrafterConfig, newer: DrafterConfig) -> Iterator[tuple[str, Any, Any]]:
    """Settings that give tensors of the two drafters different meanings: name, older, newer."""
    pairs: list[tuple[str, Any, Any]] = [
        (name, getattr(older, name), getattr(newer, name))
        for name in ("kept_layers", "alignment", "mask_token_id")
    ]
    pairs.append(("delta", older.delta is not None, newer.delta is not None))
    if older.delta is not None and newer.delta is not None:
        if older.delta.rank > newer.delta.rank:
            pairs.append(("delta.rank", older.delta.rank, newer.delta.rank))
        pairs.append(("delta.scope", older.delta.scope, newer.delta.scope))
    widths = older.previous_token_width, newer.previous_token_width
    if widths[0] is not None and widths[1] is not None and widths[0] > widths[1]:
        pairs.append(("previous_token_width", *widths))
    return (pair for pair in pairs if pair[1] != pair[2])
