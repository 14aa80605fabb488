"""Which machine, and which versions, a measurement comes from."""

from __future__ import annotations

import os
import platform
import re
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil
import torch

LOOK_S = 0.5
"""How long the machine is watched for other work, in which this process sleeps."""


def machine() -> dict[str, Any]:
    """This machine, as far as it decides about speed; load_at_start: other work, in cores."""
    return {
        "platform": platform.platform(),
        "processor": processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_bytes": psutil.virtual_memory().total,
        "gpus": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
        "load_at_start": round(
            psutil.cpu_percent(interval=LOOK_S) / 100 * (os.cpu_count() or 1), 2
        ),
    }


def processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next(
        (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")),
        platform.processor(),
    )


def versions() -> dict[str, str]:
    return {
        "d3d": version("d3d-decoding"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": version("transformers"),
    }


class PeakMemory:
    """Of the target's device: what torch has allocated on a CUDA device, else what the whole
    process holds.

    On a CPU all models that are open count, of whatever method. Linux keeps the peak itself, and
    can be asked to begin anew; where that is not to be had, it is what the process holds when the
    answer is done."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        else:
            self._has_peak = _reset_peak()

    def bytes(self) -> int:
        if self._device.type == "cuda":
            return int(torch.cuda.max_memory_allocated(self._device))
        peak = _peak() if self._has_peak else None
        return peak if peak is not None else int(psutil.Process().memory_info().rss)


def _reset_peak() -> bool:
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError:
        return False
    return True


def _peak() -> int | None:
    try:
        found = re.search(
            r"^VmHWM:\s+(\d+) kB",
            Path("/proc/self/status").read_text(encoding="ascii"),
            re.MULTILINE,
        )
    except OSError:
        return None
    return int(found[1]) * 1024 if found else None
