"""Linear weights in eight bits: half of bfloat16's memory to read for a pass, a quarter of
float32's.

A row of the weight [out_features, in_features] is whole numbers from -127 to 127 and one scale;
activations keep their dtype's precision. Two kernels, one for each dtype. What a row of a pass
comes to does not depend on how many others there are (up to FEW_ROWS in bfloat16):

- bfloat16: torch's weight-only kernel, which turns weights into floats on the way. It is quick for
  few rows; many go through the usual kernel, with weights that are turned into bfloat16 for that
  pass.
- float32, for which torch has no such kernel worth the name: a row of activations is split into
  three bytes under one scale of its own, no coarser than float32 is, and bytes are multiplied and
  summed as whole numbers, without rounding.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from d3d.errors import InvalidRequest

QUANTIZATIONS = ("int8",)
"""What `--quantize` takes."""

LARGEST = 127.0
"""A row's largest weight."""

ZERO_POINT = 128
"""Nought as a byte."""

_LAYOUT_ROWS = 16
"""Rows that the layout of a packed weight is chosen for; others run through it as well."""


def quantizations(device: torch.device) -> tuple[str, ...]:
    """Those of QUANTIZATIONS that work on this device."""
    return QUANTIZATIONS if device.type == "cpu" and _multiplies_bytes() else ()


def precision(dtype: str, quantize: str | None) -> str:
    """What is computed in, and with which weights, for a reader."""
    return dtype + (f" with {quantize} weights" if quantize else "")


def _multiplies_bytes() -> bool:
    """Without VNNI the kernel is slow, and wrong as well where the sum of two products overflows 16
    bits."""
    has = torch.cpu.get_capabilities()
    return torch.backends.mkldnn.is_available() and bool(
        has.get("avx512_vnni") or has.get("avx_vnni")
    )


def check_quantize(name: str | None, device: torch.device) -> None:
    """Raises InvalidRequest for what is not in QUANTIZATIONS, and where it does not work. None asks
    for nothing."""
    if name is None:
        return
    if name not in QUANTIZATIONS:
        raise InvalidRequest(
            f"quantize: {name!r} is not supported; use {', '.join(QUANTIZATIONS)}, or leave it out"
        )
    if device.type != "cpu":
        raise InvalidRequest(
            f"quantize: int8 runs on a CPU only, not on {device}; leave it out, or use the device cpu"
        )
    if not _multiplies_bytes():
        raise InvalidRequest(
            "quantize: int8 needs a processor with VNNI (AVX-512 VNNI or AVX-VNNI) and a torch with oneDNN; leave it out"
        )


FEW_ROWS = 32
"""Up to this many rows the weight-only kernel takes less time than making floats of the weights."""

_KERNEL_STEP = 16
"""The weight-only kernel reads so many numbers of a row at a time, and nothing stops it at the
row's end."""

_ALIGNMENT = 32
"""Of its activations, in bytes."""


class Split:
    """How a row of activations becomes bytes, the highest first."""

    def __init__(self, num_bytes: int) -> None:
        places = [256**place for place in reversed(range(num_bytes))]
        self.reach = LARGEST * places[0]
        """What a row's largest activation becomes."""
        self.zero = ZERO_POINT * sum(places) + (0.5 if num_bytes < 3 else 0.0)
        """Added, so that every byte's nought is ZERO_POINT. Half more, since what is behind the
        point is cut off; with three bytes float32 has nothing behind the point."""
        self.shifts = torch.tensor(
            [8 * place for place in reversed(range(num_bytes))], dtype=torch.int32
        ).view(-1, 1, 1)


SPLITS = {torch.bfloat16: Split(2), torch.float32: Split(3)}


class Int8Weight(nn.Parameter):
    """A rounded weight, readable by `product` alone. Layers may share one as they share any
    weight."""

    scales: Tensor
    """[out_features]."""
    origin: torch.dtype
    """What the weight was."""

    @staticmethod
    def of(weight: Tensor) -> Int8Weight:
        """weight [out_features, in_features], of float32 or bfloat16 on a CPU. The error is at most
        half a scale, a scale being about 1/127 of the row's largest weight."""
        weight = weight.detach()
        suits = weight.dtype is torch.bfloat16 and weight.shape[1] % _KERNEL_STEP == 0
        return Int8Rows.of(weight) if suits else Int8Blocks.of(weight)

    @property
    def is_mkldnn(self) -> bool:  # type: ignore[override]
        """Whoever asks wants to know whether it can be read as it is."""
        return True

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x [..., in_features] of the weight's former dtype, bias [out_features] -> [...,
        out_features] in x's dtype."""
        raise NotImplementedError


class Int8Rows(Int8Weight):
    """int8 [out_features, in_features] as it is, scales in bfloat16, for activations in
    bfloat16."""

    @staticmethod
    def of(weight: Tensor) -> Int8Rows:
        whole, scales = quantize(weight)
        self = torch.Tensor._make_subclass(Int8Rows, whole, False)
        self.scales, self.origin = scales.to(weight.dtype), weight.dtype
        return self

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        if len(rows) > FEW_ROWS:
            y = F.linear(rows, self.to(x.dtype)).mul_(self.scales)
        else:
            y = torch._weight_int8pack_mm(
                rows.clone() if rows.data_ptr() % _ALIGNMENT else rows, self, self.scales
            )
        if bias is not None:
            y.add_(bias)
        return y.view(*x.shape[:-1], len(self.scales))

    def to_dense(
        self, dtype: torch.dtype | None = None, *, masked_grad: bool | None = None
    ) -> Tensor:
        """The rounded weight [out_features, in_features]."""
        return (self.float() * self.scales.float()[:, None]).to(dtype or self.origin)


class Int8Blocks(Int8Weight):
    """In oneDNN's blocks, by itself int8 [in_features, out_features]; scales in float32."""

    zero_points: Tensor
    """Zeros, int64 [out_features], which the kernel asks for."""

    @staticmethod
    def of(weight: Tensor) -> Int8Blocks:
        whole, scales = quantize(weight)
        packed = torch.ops.onednn.qlinear_prepack(whole, [_LAYOUT_ROWS, weight.shape[1]])
        self = torch.Tensor._make_subclass(Int8Blocks, packed, False)
        self.scales, self.zero_points = scales, torch.zeros(len(scales), dtype=torch.long)
        self.origin = weight.dtype
        return self

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        split = SPLITS[x.dtype]
        rows = x.reshape(-1, x.shape[-1]).float()
        largest = rows.abs().amax(-1, keepdim=True)
        # a row of zeros becomes anything times its largest, nought; NaN and infinity come out as
        # such by the same product
        whole = (rows * largest.reciprocal().mul_(split.reach)).add_(split.zero).to(torch.int32)
        parts = torch.bitwise_right_shift(whole, split.shifts).to(torch.uint8).view(-1, x.shape[-1])
        sums = torch.ops.onednn.qlinear_pointwise(
            parts,
            1 / split.reach,
            ZERO_POINT,
            self,
            self.scales,
            self.zero_points,
            None,
            1.0,
            0,
            torch.float32,
            "none",
            [],
            "",
        )
        y, *lower = sums.split(len(rows))
        for part in lower:
            y = part.add_(y, alpha=256)
        y = y.mul_(largest) if bias is None else torch.addcmul(bias.float(), y, largest)
        return y.to(x.dtype).view(*x.shape[:-1], len(self.scales))

    def to_dense(
        self, dtype: torch.dtype | None = None, *, masked_grad: bool | None = None
    ) -> Tensor:
        """The rounded weight [out_features, in_features]."""
        return self.product(torch.eye(self.shape[0]), None).T.contiguous().to(dtype or self.origin)


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """weight [out_features, in_features] -> whole numbers, int8 of the same shape, and scales,
    float32 [out_features], which are numbers of the weight's dtype."""
    scales = (weight.float().abs().amax(1) / LARGEST).to(weight.dtype).float()
    whole = (
        (weight.float() / scales[:, None]).nan_to_num_().round_()
    )  # a row of zeros is divided by nought
    return whole.clamp_(-LARGEST, LARGEST).to(torch.int8), scales
