"""The most memory that was in use while an answer was made."""

from __future__ import annotations

import re
from pathlib import Path

import psutil
import torch


class PeakMemory:
    """Of the target's device: what torch has allocated on a CUDA device, else what the whole process holds.

    On a CPU all models that are open count, of whatever method. Linux keeps the peak itself, and can be asked to begin anew; where
    that is not to be had, it is what the process holds when the answer is done.
    """

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
        found = re.search(r"^VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text(encoding="ascii"), re.MULTILINE)
    except OSError:
        return None
    return int(found[1]) * 1024 if found else None
