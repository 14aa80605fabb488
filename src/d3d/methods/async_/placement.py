"""Where target and draft worker run, and which cores each of them has."""

from __future__ import annotations

import os
import threading

import torch

from d3d.errors import InvalidRequest
from d3d.methods.async_.config import Placement

PLACEMENTS: tuple[Placement, ...] = ("thread", "processes", "streams", "devices")


def check_placement(name: str, device: torch.device) -> None:
    """Raises InvalidRequest for a placement that does not exist, or not for a target on this
    device."""
    if name not in PLACEMENTS:
        raise InvalidRequest(f"placement: {name!r} is not one of {', '.join(PLACEMENTS)}")
    if name in ("streams", "devices") and device.type != "cuda":
        raise InvalidRequest(
            f"placement: {name} is for CUDA, and this target is on {device}{_without_cuda()}; use "
            "thread or processes"
        )
    if name == "devices" and torch.cuda.device_count() < 2:
        raise InvalidRequest(
            "placement: devices needs a second CUDA device for the drafter, and there is one; use "
            "streams"
        )
    if name == "processes" and device.type != "cpu":
        raise InvalidRequest(
            f"placement: processes shares out CPU cores, and this target is on {device}; use "
            "streams or thread"
        )


def default_placement(device: torch.device) -> Placement:
    """Of a target on this device: on CUDA the drafter gets another device where there is one, else
    a stream."""
    if device.type != "cuda":
        return "thread"
    return "devices" if torch.cuda.device_count() > 1 else "streams"


def other_device(device: torch.device) -> torch.device:
    """The first CUDA device but the target's."""
    taken = torch.cuda.current_device() if device.index is None else device.index
    return torch.device("cuda", 1 if taken == 0 else 0)


def _without_cuda() -> str:
    """Why there is no CUDA, if there is none."""
    if torch.cuda.is_available():
        return ""
    return (
        " (this build of torch has no CUDA)"
        if torch.version.cuda is None
        else " (no CUDA device is to be had here)"
    )


def available_cores() -> list[int]:
    """The cores that this process may run on; where the system does not tell, as many as it has."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def worker_cores(cores: list[int]) -> list[int]:
    """The share of a draft process: the last half of them, rounded down; of one core that one."""
    return cores[-max(1, len(cores) // 2) :]


class TargetThreads:
    """While somebody holds it, torch uses as many threads here as the worker's cores leave. Not
    fewer than one.

    A thread more would wait for its core at every matrix product. The number is the whole
    process's; it is put back in the end."""

    def __init__(self, num_threads: int) -> None:
        self._num_threads = max(1, num_threads)
        self._holders = 0
        self._before = 0
        self._lock = threading.Lock()

    def hold(self) -> None:
        with self._lock:
            self._holders += 1
            if self._holders == 1:
                self._before = torch.get_num_threads()
                torch.set_num_threads(min(self._before, self._num_threads))

    def let_go(self) -> None:
        with self._lock:
            self._holders -= 1
            if self._holders == 0:
                torch.set_num_threads(self._before)
