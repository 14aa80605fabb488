"""The linear layers. `linear` is the one function through which every weight is read: a better kernel goes here."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [..., in_features], weight [out_features, in_features] as it is or packed, bias [out_features] -> [..., out_features]."""
    if weight.is_mkldnn and torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        raise RuntimeError("packed weights can't be trained: pack_weights is for inference, and needs torch.no_grad or inference_mode")
    if weight.is_mkldnn or _onednn_serves(x, weight):
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
        return y
    return F.linear(x, weight, bias)


def _onednn_serves(x: Tensor, weight: Tensor) -> bool:
    """float32 on a CPU without gradients: oneDNN, which `F.linear` takes for bfloat16 only, is about twice as fast from 1 to 800 rows
    (docs/log.md). The operator is the one that torch's own compiler emits; it has no derivative."""
    if x.dtype is not torch.float32 or x.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    return not (torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad))


PACKING_ROWS = 16
"""Rows that the layout of a packed weight is chosen for; others run through it as well (docs/log.md)."""


class Linear(nn.Module):
    """A weight, perhaps a bias, and perhaps a low-rank delta that acts on a pass's last rows only.

    The delta is `up @ down` with `down` [rank, in_features] and `up` [out_features, rank] (LoRA, arXiv 2106.09685, scale 1).
    """

    matrices = ("weight", "down", "up", "merged")
    """Attributes that `pack_weights` may pack, as any module can name its own."""

    down: Tensor | None
    up: Tensor | None
    merged: Tensor | None

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        self.down = None
        self.up = None
        self.merged = None

    def add_delta(self, down: Tensor, up: Tensor) -> None:
        """Attach a low-rank delta; it is a parameter of its own, the weight stays as it is."""
        self.down = nn.Parameter(down)
        self.up = nn.Parameter(up)

    def forward(self, x: Tensor, delta_rows: int = 0) -> Tensor:
        """x [batch, rows, in_features] -> [batch, rows, out_features]; the delta acts on the last `delta_rows` rows."""
        if self.merged is not None and delta_rows == x.shape[1]:
            return linear(x, self.merged, self.bias)
        y = linear(x, self.weight, self.bias)
        if not delta_rows or (down := self.down) is None or (up := self.up) is None:
            return y
        first = x.shape[1] - delta_rows
        slots = x[:, first:] if first else x
        delta = linear(linear(slots, down.to(x.dtype)), up.to(x.dtype))
        if torch.is_grad_enabled():
            return y + delta if first == 0 else torch.cat((y[:, :first], y[:, first:] + delta), dim=1)
        y[:, first:].add_(delta)
        return y


def merge_deltas(model: nn.Module) -> None:
    """Give every layer that has a delta the sum of weight and delta, for passes in which the delta acts on all rows: they cost what the
    weight alone costs. For inference: a delta that changes later does not change the sum."""
    for module in model.modules():
        if isinstance(module, Linear) and module.down is not None and module.up is not None:
            weight = module.weight.to_dense() if module.weight.is_mkldnn else module.weight
            merged = weight.float() + module.up.detach().float() @ module.down.detach().float()
            module.merged = nn.Parameter(merged.to(module.weight.dtype), requires_grad=False)


def pack_weights(*models: nn.Module) -> None:
    """Put every linear layer's weight into the blocks that oneDNN's kernels read, in place: half the time of reading it row by row
    (docs/log.md). Layers that share a weight go on sharing it; an embedding that is a head as well stays as it is, beside the blocks.

    For inference only: `linear` alone can read the blocks, and they have no derivative. Where there is no such kernel nothing happens.
    """
    users: dict[int, list[tuple[nn.Module, str]]] = {}
    for model in models:
        for module in model.modules():
            for name in getattr(module, "matrices", ()):
                if _can_be_packed(getattr(module, name)):
                    users.setdefault(id(getattr(module, name)), []).append((module, name))
    for places in users.values():
        weight = getattr(*places[0])
        packed = nn.Parameter(torch.ops.mkldnn._reorder_linear_weight(weight.detach(), PACKING_ROWS), weight.requires_grad)
        for module, name in places:
            setattr(module, name, packed)


def _can_be_packed(weight: Tensor | None) -> bool:
    if weight is None or weight.is_mkldnn or weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    return weight.dtype is torch.float32 or (weight.dtype is torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())
