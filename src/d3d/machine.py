"""Machine and versions behind a measurement."""

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
"""Seconds for which other load on the machine is sampled; this process sleeps meanwhile."""


def machine() -> dict[str, Any]:
    """Facts about this machine that affect speed. load_at_start: other load, in busy cores."""
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
    return _cpu_facts().get("model name") or platform.processor()


def processor_model() -> str:
    """Family, model and instruction set: virtual machines give different processors one name."""
    facts = _cpu_facts()
    names = ("cpu family", "model")
    return " ".join(
        [*(facts.get(name, "") for name in names), torch.backends.cpu.get_cpu_capability()]
    )


def cpu_flags() -> frozenset[str]:
    """Instruction sets that processor and system allow, as Linux names them; empty elsewhere."""
    return frozenset(_cpu_facts().get("flags", "").split())


def _cpu_facts() -> dict[str, str]:
    """Facts about the first core in /proc/cpuinfo; empty if there is no such file."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return {}
    pairs = (line.partition(":") for line in text.split("\n\n")[0].splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}


def versions() -> dict[str, str]:
    return {
        "d3d": version("d3d-decoding"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": version("transformers"),
    }


class PeakMemory:
    """Peak memory: torch's allocations on a CUDA device, else the whole process's resident set.

    On a CPU this covers all open models. Linux tracks the peak itself and can reset it; elsewhere
    the current resident set is returned."""

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
        match = re.search(
            r"^VmHWM:\s+(\d+) kB",
            Path("/proc/self/status").read_text(encoding="ascii"),
            re.MULTILINE,
        )
    except OSError:
        return None
    return int(match[1]) * 1024 if match else None
