"""How a drafter's tensors are stored: as they are, or as int8 with a scale a row."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from d3d.errors import InvalidCheckpoint

SCALE = ".scale"
Storage = Literal["int8", "float32"]


def pack(tensors: dict[str, Tensor], storage: Storage) -> dict[str, Tensor]:
    """What is written for `tensors`, on the CPU. Those of whole numbers become int32.

    float32: the tensors themselves. int8: a matrix [rows, columns] becomes int8 and gets a float32
    scale [rows] under NAME.scale, its row's largest magnitude / 127, so a value is off by at most
    half a scale; vectors stay float32."""
    stored = {
        name: tensor.detach().to(_kind(tensor)).cpu().contiguous()
        for name, tensor in tensors.items()
    }
    if storage == "float32":
        return stored
    packed: dict[str, Tensor] = {}
    for name, tensor in stored.items():
        if tensor.dim() < 2:
            packed[name] = tensor
            continue
        scale = tensor.abs().amax(1).clamp(min=1e-12) / 127
        packed[name] = (tensor / scale[:, None]).round().to(torch.int8)
        packed[name + SCALE] = scale
    return packed


def _kind(tensor: Tensor) -> torch.dtype:
    return torch.float32 if tensor.is_floating_point() else torch.int32


def unpack(
    file: Path, stored: dict[str, Tensor], shapes: dict[str, torch.Size]
) -> dict[str, Tensor]:
    """Floats of `shapes` out of what `pack` has made. `file` is for messages.

    Raises InvalidCheckpoint that names the first tensor that is missing, left over, or of the wrong
    shape or type."""
    wanted = shapes | {
        name + SCALE: shapes[name][:1]
        for name, tensor in stored.items()
        if tensor.dtype == torch.int8 and name in shapes
    }
    for name in sorted(stored.keys() | wanted.keys()):
        if name not in stored:
            raise InvalidCheckpoint(f"{file} lacks {name}; get the drafter again")
        if name not in wanted:
            raise InvalidCheckpoint(
                f"{file} holds {name}, which no drafter of this config has; get the drafter again"
            )
        tensor = stored[name]
        if tensor.shape != wanted[name]:
            raise InvalidCheckpoint(
                f"{file}: {name} has shape {tuple(tensor.shape)}, the config says {tuple(wanted[name])}"
            )
        if not (
            tensor.is_floating_point()
            or (tensor.dtype == torch.int8 and name in shapes and tensor.dim() > 1)
        ):
            raise InvalidCheckpoint(
                f"{file}: {name} holds {tensor.dtype}, which no drafter stores; get the drafter again"
            )
    return {
        name: stored[name].float() * stored[name + SCALE].float()[:, None]
        if stored[name].dtype == torch.int8
        else stored[name]
        for name in shapes
    }
