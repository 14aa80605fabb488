"""Linear weights rounded to eight bits: half of bfloat16's memory traffic, a quarter of float32's.

A weight [out_features, in_features] becomes integers from -127 to 127 and one scale per output row;
activations keep the precision of their dtype. Each dtype has one kernel, and a row of a pass comes
to the same bits however many rows the pass has (in bfloat16: up to FEW_ROWS):

- bfloat16: torch's weight-only kernel, which converts weights to floats as it reads them. It is
  fast for few rows; larger passes use the ordinary kernel on weights converted for that pass.
- float32, for which torch has no vectorised kernel: every row of activations is split into three
  bytes under one scale, 24 bits as in float32. oneDNN multiplies the bytes and sums the products in
  int32, without rounding, and returns each sum as the nearest float32. It is given no scales and no
  zero point, since kernels apply those in different orders; they are applied here.

Both kernels are probed, once for each shape of weight. One that fails is not used: bfloat16 then
takes the byte kernel with two bytes, and if that fails as well, products are summed in float64,
which is exact and slow.
"""

from __future__ import annotations

import functools
import warnings

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from d3d.errors import InvalidRequest

QUANTIZATIONS = ("int8",)
"""The values of `--quantize`."""

LARGEST = 127.0
"""The integer that a row's largest weight becomes."""

ZERO_POINT = 128
"""The highest byte of an activation of zero."""

_LAYOUT_ROWS = 16
"""Number of rows for which oneDNN chooses the layout of a packed weight; any number works."""

_PROBED_ROWS = (1, 2, 3, 5, 17)
"""Widths of the passes in which a kernel is probed."""

_PROBED_FEATURES = 1024
"""Weights with more output rows are probed with about so many."""

_EXACT_FEATURES = 4096
"""Output rows that are converted to float64 at a time, to bound the memory."""


def quantizations(device: torch.device) -> tuple[str, ...]:
    """The members of QUANTIZATIONS that work on this device."""
    return QUANTIZATIONS if device.type == "cpu" and _multiplies_bytes() else ()


def precision(dtype: str, quantize: str | None) -> str:
    """The dtype and the kind of weights, as reports print them."""
    return dtype + (f" with {quantize} weights" if quantize else "")


def _multiplies_bytes() -> bool:
    """Whether this processor has VNNI. Without it oneDNN's kernel is slow, and it is wrong if the
    sum of two products overflows 16 bits."""
    has = torch.cpu.get_capabilities()
    return torch.backends.mkldnn.is_available() and bool(
        has.get("avx512_vnni") or has.get("avx_vnni")
    )


def check_quantize(name: str | None, device: torch.device) -> None:
    """Raise InvalidRequest if the name is unknown or does not work on the device. None is always
    allowed."""
    if name is None:
        return
    if name not in QUANTIZATIONS:
        raise InvalidRequest(
            f"quantize: {name!r} is not supported; use {', '.join(QUANTIZATIONS)}, or leave it out"
        )
    if device.type != "cpu":
        raise InvalidRequest(
            f"quantize: int8 runs on a CPU only, not on {device}; leave it out, "
            "or use the device cpu"
        )
    if not _multiplies_bytes():
        raise InvalidRequest(
            "quantize: int8 needs a processor with VNNI (AVX-512 VNNI or AVX-VNNI) "
            "and a torch with oneDNN; leave it out"
        )


FEW_ROWS = 32
"""The weight-only kernel is faster than converting the weights for passes of up to so many rows."""

_KERNEL_STEP = 16
"""The weight-only kernel reads a row in groups of so many numbers, and reads beyond a row that is
no multiple."""

_ALIGNMENT = 32
"""Of the weight-only kernel's activations, in bytes."""


class Split:
    """How a row of activations becomes bytes, the highest first. Added up with their places, they
    are the activation in units of the row's largest / reach, plus `zero`."""

    def __init__(self, num_bytes: int) -> None:
        places = [256**place for place in reversed(range(num_bytes))]
        self.reach = LARGEST * places[0]
        """The integer that a row's largest activation becomes."""
        self.zero = ZERO_POINT * places[0] + (0.5 if num_bytes < 3 else 0.0)
        """Added to make every integer positive. The half turns the truncation that follows into
        rounding; with three bytes float32 has no place for it."""
        self.shifts = torch.tensor(
            [8 * place for place in reversed(range(num_bytes))], dtype=torch.int32
        ).view(-1, 1, 1)

    def parts(self, rows: Tensor, largest: Tensor) -> Tensor:
        """rows [rows, in_features] float32, largest [rows, 1] float32 -> uint8 [num_bytes * rows,
        in_features]: the highest byte of every row, then the next."""
        scaled = rows * largest.reciprocal().mul_(self.reach)
        whole = scaled.add_(self.zero).to(torch.int32)
        return torch.bitwise_right_shift(whole, self.shifts).to(torch.uint8).view(-1, rows.shape[1])


SPLITS = {torch.bfloat16: Split(2), torch.float32: Split(3)}


class Int8Weight(nn.Parameter):
    """A rounded weight, which only `product` can read. Layers may share one like any weight."""

    scales: Tensor
    """[out_features]."""
    origin: torch.dtype
    """The dtype of the weight before it was rounded."""

    @staticmethod
    def of(weight: Tensor) -> Int8Weight:
        """Round a weight [out_features, in_features], float32 or bfloat16 on a CPU. The error is at
        most half a scale; a scale is about 1/127 of the row's largest weight."""
        whole, scales = quantize(weight.detach())
        num_bytes = len(SPLITS[weight.dtype].shifts)
        if (
            weight.dtype is torch.bfloat16
            and weight.shape[1] % _KERNEL_STEP == 0
            and _rows_are_steady(*_probed_shape(whole))
        ):
            kind: type[Int8Weight] = Int8Rows
        elif _sums_are_exact(num_bytes, *_probed_shape(whole)):
            kind = Int8Blocks
        else:
            kind = Int8Exact
            warnings.warn(
                "quantize int8: this processor's int8 kernels don't give a row the same bits in "
                "passes of every width, so products are summed in float64 instead: exact, but "
                "slower than without quantize",
                stacklevel=2,
            )
        return kind.pack(whole, scales, weight.dtype)

    @classmethod
    def pack(cls, whole: Tensor, scales: Tensor, origin: torch.dtype) -> Int8Weight:
        """whole int8 [out_features, in_features], scales float32 [out_features]."""
        raise NotImplementedError

    @property
    def is_mkldnn(self) -> bool:  # type: ignore[override]
        """True, like that of any packed weight: its numbers can't be read as they are."""
        return True

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x [..., in_features] of the dtype `origin`, bias [out_features] -> [..., out_features] in
        x's dtype."""
        raise NotImplementedError

    def to_dense(
        self,
        dtype: torch.dtype | None = None,
        *,
        masked_grad: bool | None = None,  # noqa: ARG002
    ) -> Tensor:
        """The rounded weight [out_features, in_features], as Tensor's method of that name."""
        return self._rounded().to(dtype or self.origin)

    def _rounded(self) -> Tensor:
        """float32 [out_features, in_features]."""
        return self.float() * self.scales.float()[:, None]


class Int8Rows(Int8Weight):
    """For torch's weight-only kernel: int8 [out_features, in_features], scales and activations in
    bfloat16."""

    @classmethod
    def pack(cls, whole: Tensor, scales: Tensor, origin: torch.dtype) -> Int8Rows:
        self = torch.Tensor._make_subclass(cls, whole, False)
        self.scales, self.origin = scales.to(origin), origin
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


class Int8Sums(Int8Weight):
    """Base class of weights that multiply activations byte by byte and apply the scales afterwards.

    The only sums of many numbers are `sums`, which is exact but for one rounding of an integer to
    float32. What follows works element by element, one rounding an operation, so a result depends
    on its own row and column alone."""

    steps: Tensor
    """What a sum of 1 stands for if the row's largest activation is 1, float32 [out_features]."""
    zero_sums: Tensor
    """What ZERO_POINT contributes to each sum of the highest bytes, float32 [out_features]."""

    def sums(self, parts: Tensor) -> Tensor:
        """uint8 [rows, in_features] -> float32 [rows, out_features], the product with the int8
        weight. Each sum is the exact one, rounded once."""
        raise NotImplementedError

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        rows = x.reshape(-1, x.shape[-1]).float()
        # The bytes of a row of zeros are arbitrary, but its products are multiplied by 0. NaN and
        # infinity come out through `largest` too.
        largest = rows.abs().amax(-1, keepdim=True)
        sums = self.sums(SPLITS[self.origin].parts(rows, largest))
        highest, *lower = sums.split(len(rows))
        y: Tensor = highest.sub_(self.zero_sums)
        for part in lower:
            y = part.add_(y, alpha=256)
        y = y.mul_(self.steps).mul_(largest)
        if bias is not None:
            # not fused with the product: a fused operation rounds once, and whether a processor
            # fuses can depend on the element's place in memory
            y = y.add_(bias)
        return y.to(x.dtype).view(*x.shape[:-1], len(self.scales))

    def _remember(self, whole: Tensor, scales: Tensor, origin: torch.dtype) -> None:
        self.scales, self.origin = scales, origin
        self.steps = scales / SPLITS[origin].reach
        self.zero_sums = whole.sum(1, dtype=torch.int32).mul_(ZERO_POINT).float()


class Int8Blocks(Int8Sums):
    """In oneDNN's blocks, int8 [in_features, out_features]; scales in float32."""

    @classmethod
    def pack(cls, whole: Tensor, scales: Tensor, origin: torch.dtype) -> Int8Blocks:
        packed = torch.ops.onednn.qlinear_prepack(whole, [_LAYOUT_ROWS, whole.shape[1]])
        self = torch.Tensor._make_subclass(cls, packed, False)
        self._remember(whole, scales, origin)
        return self

    def sums(self, parts: Tensor) -> Tensor:
        as_it_is = (1.0, 0)  # scale, zero point
        y: Tensor = torch.ops.onednn.qlinear_pointwise(
            parts, *as_it_is, self, _ONE, _ZERO, None, *as_it_is, torch.float32, "none", [], ""
        )
        return y

    def _rounded(self) -> Tensor:
        return self.sums(torch.eye(self.shape[0], dtype=torch.uint8)).T * self.scales[:, None]


_ONE, _ZERO = torch.ones(1), torch.zeros(1, dtype=torch.long)


class Int8Exact(Int8Sums):
    """For processors on which no kernel serves: int8 [out_features, in_features]; scales in
    float32. Slow, since the weight is converted for every pass."""

    @classmethod
    def pack(cls, whole: Tensor, scales: Tensor, origin: torch.dtype) -> Int8Exact:
        self = torch.Tensor._make_subclass(cls, whole, False)
        self._remember(whole, scales, origin)
        return self

    def sums(self, parts: Tensor) -> Tensor:
        return exact_sums(parts, self.as_subclass(torch.Tensor))


def exact_sums(parts: Tensor, whole: Tensor) -> Tensor:
    """parts uint8 [rows, in_features], whole int8 [out_features, in_features] -> float32 [rows,
    out_features], their product rounded once. float64 holds every sum of products of two bytes, so
    they are exact in whatever order they are added."""
    left = parts.double()
    blocks = [F.linear(left, block.double()) for block in whole.split(_EXACT_FEATURES)]
    sums: Tensor = torch.cat(blocks, dim=1).float()
    return sums


def _probed_shape(whole: Tensor) -> tuple[int, int]:
    """The shape, or that of a smaller weight whose blocks end in the same way."""
    out_features, in_features = whole.shape
    return min(out_features, _PROBED_FEATURES + out_features % _PROBED_FEATURES), in_features


def _probing_weight(
    generator: torch.Generator, out_features: int, in_features: int
) -> tuple[Tensor, Tensor]:
    """An int8 weight and its scales; the first row gives the largest sums that there are."""
    whole = torch.randint(
        -127, 128, (out_features, in_features), dtype=torch.int8, generator=generator
    )
    whole[0] = 127
    return whole, torch.rand(out_features, generator=generator).add_(0.5)


@functools.cache
def _sums_are_exact(num_bytes: int, out_features: int, in_features: int) -> bool:
    """Whether oneDNN's byte kernel returns exact sums, rounded once, in passes of any width."""
    generator = torch.Generator().manual_seed(0)
    whole, scales = _probing_weight(generator, out_features, in_features)
    packed = Int8Blocks.pack(whole, scales, torch.float32)
    shape = (num_bytes * max(_PROBED_ROWS), in_features)
    parts = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    parts[0] = 255
    exact = exact_sums(parts, whole)
    counts = [num_bytes * rows for rows in _PROBED_ROWS]
    return all(torch.equal(packed.sums(parts[:count]), exact[:count]) for count in counts)


@functools.cache
def _rows_are_steady(out_features: int, in_features: int) -> bool:
    """Whether torch's weight-only kernel gives a row the same bits in passes of any width up to
    FEW_ROWS, and at any place in them."""
    generator = torch.Generator().manual_seed(0)
    whole, scales = _probing_weight(generator, out_features, in_features)
    packed = Int8Rows.pack(whole, scales, torch.bfloat16)
    x = torch.randn(FEW_ROWS, in_features, generator=generator).bfloat16()
    widest = packed.product(x, None)
    return all(
        torch.equal(packed.product(x[-rows:], None), widest[-rows:]) for rows in _PROBED_ROWS
    )


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """weight [out_features, in_features] -> integers, int8 of the same shape, and scales, float32
    [out_features], which the weight's dtype can hold."""
    scales = (weight.float().abs().amax(1) / LARGEST).to(weight.dtype).float()
    # a row of zeros is divided by zero
    whole = (weight.float() / scales[:, None]).nan_to_num_().round_()
    return whole.clamp_(-LARGEST, LARGEST).to(torch.int8), scales
