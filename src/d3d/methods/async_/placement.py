"""Placement of target and draft worker on devices and cores."""

from __future__ import annotations

import os
import threading
from typing import NamedTuple

import torch

from d3d.errors import InvalidRequest
from d3d.methods.async_.config import Placement

PLACEMENTS: tuple[Placement, ...] = ("thread", "processes", "streams", "devices")

FEWEST_CORES = 4
"""Fewest cores for a draft process in auto mode: target and process get half of them each, and
both need more than one."""


def check_placement(name: str, device: torch.device) -> None:
    """Check a placement. Raises InvalidRequest if it does not exist, or does not fit the target's
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
    """On CUDA the drafter gets a device of its own if there is one, else a stream; on a CPU it gets
    a thread."""
    if device.type != "cuda":
        return "thread"
    return "devices" if torch.cuda.device_count() > 1 else "streams"


def other_device(device: torch.device) -> torch.device:
    """The first CUDA device but the target's."""
    taken = torch.cuda.current_device() if device.index is None else device.index
    return torch.device("cuda", 1 if taken == 0 else 0)


def _without_cuda() -> str:
    """Reason why CUDA is missing; empty if it is not."""
    if torch.cuda.is_available():
        return ""
    return (
        " (this build of torch has no CUDA)"
        if torch.version.cuda is None
        else " (there is no CUDA device)"
    )


def available_cores() -> list[int]:
    """Cores that this process may run on; all of them if the system does not say."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def worker_cores(cores: list[int]) -> list[int]:
    """Cores for a draft process: the last half of them, rounded down, but one at least."""
    return cores[-max(1, len(cores) // 2) :]


class Room(NamedTuple):
    """A placement for async mode in auto mode, or why there is none."""

    placement: str | None
    reason: str = ""


def room_for_worker(device: torch.device, num_cores: int, *, is_stored: bool) -> Room:
    """Placement of auto mode's draft worker.

    device: the target's; is_stored: True if the drafter came from a checkpoint, which another
    process can load."""
    if device.type == "cuda":
        reasons = []
        for name in ("devices", "streams"):
            try:
                check_placement(name, device)
            except InvalidRequest as error:
                reasons.append(str(error).removeprefix("placement: "))
            else:
                return Room(name)
        return Room(None, reasons[-1])
    if num_cores < FEWEST_CORES:
        cores = "one core" if num_cores == 1 else f"{num_cores} cores"
        return Room(None, f"target and drafter would share {cores} and one memory bus")
    if not is_stored:
        return Room(
            None, "the drafter was not loaded from a checkpoint, which a draft process needs"
        )
    return Room("processes")


class TargetThreads:
    """Limits torch, while acquired, to the threads that the worker's cores leave, at least one.

    A thread more would wait for its core at every matrix product. The number is the whole
    process's; the last `release` restores it."""

    def __init__(self, num_threads: int) -> None:
        self._num_threads = max(1, num_threads)
        self._num_acquired = 0
        self._before = 0
        self._lock = threading.Lock()

    def acquire(self) -> None:
        with self._lock:
            self._num_acquired += 1
            if self._num_acquired == 1:
                self._before = torch.get_num_threads()
                torch.set_num_threads(min(self._before, self._num_threads))

    def release(self) -> None:
        with self._lock:
            self._num_acquired -= 1
            if self._num_acquired == 0:
                torch.set_num_threads(self._before)
