"""Linear layers with low-rank deltas, and weights packed for the CPU's kernels. All products go
through `linear`, so a faster kernel belongs there."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from d3d.model.int8 import Int8Weight


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [..., in_features], weight [out_features, in_features], packed or not, bias [out_features]
    -> [..., out_features]. Raises RuntimeError if a gradient through a packed weight is needed."""
    if weight.is_mkldnn and torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        raise RuntimeError(
            "packed weights can't be trained: pack_weights is for inference, "
            "and needs torch.no_grad or inference_mode"
        )
    if isinstance(weight, Int8Weight):
        return weight.product(x, bias)
    if weight.is_mkldnn or _onednn_serves(x, weight):
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
        return y
    return F.linear(x, weight, bias)


def _onednn_serves(x: Tensor, weight: Tensor) -> bool:
    """True if oneDNN should multiply an unpacked weight: float32 on a CPU, without gradients (the
    operator has no derivative). `F.linear` uses oneDNN for bfloat16 only; in float32 oneDNN is
    about twice as fast for 1 to 800 rows (docs/log.md)."""
    if (
        x.dtype is not torch.float32
        or x.device.type != "cpu"
        or not torch.backends.mkldnn.is_available()
    ):
        return False
    return not (torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad))


PACKING_ROWS = 16
"""Number of rows for which oneDNN chooses the layout of a packed weight; any number works
(docs/log.md)."""


class Linear(nn.Module):
    """A weight, with an optional bias and an optional low-rank delta that acts on the last rows of
    a pass only.

    The delta is `up @ down` with `down` [rank, in_features] and `up` [out_features, rank] (LoRA,
    arXiv 2106.09685, scale 1)."""

    matrices = ("weight", "down", "up", "merged")
    """Attributes that `pack_weights` packs; other modules declare theirs the same way."""

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
        """Attach a low-rank delta, with its own parameters; the weight is unchanged."""
        self.down = nn.Parameter(down)
        self.up = nn.Parameter(up)

    def forward(self, x: Tensor, delta_rows: int = 0) -> Tensor:
        """x [batch, rows, in_features] -> [batch, rows, out_features]; the delta acts on the last
        `delta_rows` rows."""
        if self.merged is not None and delta_rows == x.shape[1]:
            return linear(x, self.merged, self.bias)
        y = linear(x, self.weight, self.bias)
        if not delta_rows or (down := self.down) is None or (up := self.up) is None:
            return y
        first = x.shape[1] - delta_rows
        slots = x[:, first:] if first else x
        delta = linear(linear(slots, down.to(x.dtype)), up.to(x.dtype))
        if torch.is_grad_enabled():
            return (
                y + delta if first == 0 else torch.cat((y[:, :first], y[:, first:] + delta), dim=1)
            )
        y[:, first:].add_(delta)
        return y


def merge_deltas(model: nn.Module) -> None:
    """Add a merged weight to every layer that has a delta, so that passes in which the delta acts
    on all rows cost no more than without it. For inference: a delta that changes later is not
    merged again."""
    for module in model.modules():
        if isinstance(module, Linear) and module.down is not None and module.up is not None:
            weight = module.weight.to_dense() if module.weight.is_mkldnn else module.weight
            merged = weight.float() + module.up.detach().float() @ module.down.detach().float()
            module.merged = nn.Parameter(merged.to(weight.dtype), requires_grad=False)


def pack_weights(*models: nn.Module, quantize: str | None = None) -> None:
    """Convert every linear layer's weight, in place, to the blocks that oneDNN's kernels read; a
    product then takes half the time (docs/log.md). Shared weights stay shared. An embedding that is
    also the head is kept beside its blocks.

    quantize: "int8" rounds the weights of layers and head, and merged ones, to eight bits
    (`Int8Weight`); deltas and the previous-token head are small and are not rounded. Use
    `check_quantize` first. For inference only: only `linear` reads packed weights, and they have no
    derivative. Weights of a dtype or device without such kernels stay unpacked."""
    if quantize is not None:
        layers = [
            module for model in models for module in model.modules() if isinstance(module, Linear)
        ]
        _replace(
            [(layer, name) for layer in layers for name in ("weight", "merged")], Int8Weight.of
        )
    places = [
        (module, name)
        for model in models
        for module in model.modules()
        for name in getattr(module, "matrices", ())
    ]
    _replace([place for place in places if _can_be_packed(getattr(*place))], _in_blocks)


def _replace(places: list[tuple[nn.Module, str]], make: Callable[[Tensor], nn.Parameter]) -> None:
    """Replace weights; shared ones are converted once."""
    # keeps the old weights alive, so that no id is used twice
    made: dict[int, tuple[Tensor, nn.Parameter]] = {}
    for module, name in places:
        weight = getattr(module, name)
        if weight is None or isinstance(weight, Int8Weight):
            continue
        if id(weight) not in made:
            made[id(weight)] = weight, make(weight)
        setattr(module, name, made[id(weight)][1])


def _in_blocks(weight: Tensor) -> nn.Parameter:
    return nn.Parameter(
        torch.ops.mkldnn._reorder_linear_weight(weight.detach(), PACKING_ROWS), weight.requires_grad
    )


def _can_be_packed(weight: Tensor | None) -> bool:
    if (
        weight is None
        or weight.is_mkldnn
        or weight.device.type != "cpu"
        or not torch.backends.mkldnn.is_available()
    ):
        return False
    return weight.dtype is torch.float32 or (
        weight.dtype is torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )
