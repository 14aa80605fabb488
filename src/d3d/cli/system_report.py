"""Facts about this machine for `d3d doctor`."""

from __future__ import annotations

import os
import platform
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import psutil
import torch

from d3d.hub.cache import cache_root
from d3d.hub.footprint import Footprint, footprint
from d3d.model.int8 import precision, quantizations
from d3d.native import build

PACKAGES = {"d3d": "d3d-decoding", "torch": "torch", "transformers": "transformers"}
DTYPE_BYTES = {"float32": 4, "bfloat16": 2}
USABLE_SHARE = 0.9
"""Usable share of the available memory; the rest is left for activations and everything else."""


class Device(NamedTuple):
    """Device, with its memory in bytes."""

    name: str
    description: str
    total_bytes: int
    available_bytes: int
    dtypes: tuple[str, ...]
    quantize: tuple[str, ...] = ()
    """Weight quantizations supported there."""


class CachedItem(NamedTuple):
    """Fetched file or converted model."""

    name: str
    num_bytes: int


class Fit(NamedTuple):
    """Memory that a target needs in one dtype, against a device's."""

    device: str
    dtype: str
    quantize: str | None
    needed_bytes: int
    fits: bool
    longest_context: int

    @property
    def precision(self) -> str:
        return precision(self.dtype, self.quantize)

    @property
    def options(self) -> str:
        """Command-line options that select this."""
        return f"--device {self.device} --dtype {self.dtype}" + (
            f" --quantize {self.quantize}" if self.quantize else ""
        )


class TargetReport(NamedTuple):
    """Report on one target at one context length."""

    source: str
    num_parameters: int
    context: int
    fits: list[Fit]
    advice: str


def versions() -> dict[str, str]:
    return {
        "python": platform.python_version(),
        **{name: version(package) for name, package in PACKAGES.items()},
    }


def devices() -> list[Device]:
    memory = psutil.virtual_memory()
    capability = torch.backends.cpu.get_cpu_capability()
    rounded = quantizations(torch.device("cpu"))
    available = [
        Device(
            "cpu",
            f"{platform.machine()}, {capability}",
            memory.total,
            memory.available,
            tuple(DTYPE_BYTES),
            rounded,
        )
    ]
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        with torch.cuda.device(index):
            dtypes = tuple(DTYPE_BYTES) if torch.cuda.is_bf16_supported() else ("float32",)
        available.append(
            Device(f"cuda:{index}", torch.cuda.get_device_name(index), total, free, dtypes)
        )
    return available


def c_library() -> str:
    """Level of the C library on this processor, or why it can't be used. Compiles nothing."""
    try:
        level = build.chosen_level(os.environ.get("D3D_NATIVE", ""))
        compiler = " ".join(build.compiler())
    except build.NativeUnavailable as error:
        return str(error)
    return f"{level}, of {', '.join(build.levels_here())} here; compiled once by {compiler}"


def cached_items() -> list[CachedItem]:
    """All items in the cache, the largest first."""
    places = [
        path for kind in ("models", "converted") for path in (cache_root() / kind).glob("[!.]*")
    ]
    items = [CachedItem(str(path.relative_to(cache_root())), _size(path)) for path in places]
    return sorted(items, key=lambda item: -item.num_bytes)


def _size(path: Path) -> int:
    files = [path] if path.is_file() else path.rglob("*")
    return sum(file.stat().st_size for file in files if file.is_file())


def target_report(source: str, context: int | None, on: list[Device]) -> TargetReport:
    """Check whether the target fits each device. Raises InvalidCheckpoint for an unknown target."""
    size = footprint(source)
    context = min(context or size.max_length, size.max_length)
    fits = [
        _fit(size, context, device, dtype, quantize)
        for device in on
        for quantize in (None, *device.quantize)
        for dtype in device.dtypes
    ]
    return TargetReport(source, size.num_parameters, context, fits, _advice(fits, context))


def _fit(size: Footprint, context: int, device: Device, dtype: str, quantize: str | None) -> Fit:
    usable = int(device.available_bytes * USABLE_SHARE)
    needed = size.num_bytes(context, DTYPE_BYTES[dtype], quantize)
    longest = size.longest_context(usable, DTYPE_BYTES[dtype], quantize)
    return Fit(device.name, dtype, quantize, needed, needed <= usable, longest)


def _advice(fits: list[Fit], context: int) -> str:
    whole = [fit for fit in fits if fit.fits and fit.quantize is None]
    if whole:
        device = whole[-1].device
        dtypes = " or ".join(fit.dtype for fit in whole if fit.device == device)
        return f"it fits: --device {device} --dtype {dtypes}"
    if rounded := [fit for fit in fits if fit.fits]:
        return f"it fits: {rounded[-1].options}"
    roomiest = max(fits, key=lambda fit: fit.longest_context)
    if roomiest.longest_context > 0:
        return (
            f"it fits with at most {roomiest.longest_context} of {context} tokens of context: "
            f"{roomiest.options}"
        )
    return (
        "it does not fit any device here, not even with an empty context: take a smaller target, "
        "or free memory"
    )
