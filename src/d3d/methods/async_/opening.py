"""Makes the coordinator and the worker for a placement."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from d3d.errors import InvalidRequest
from d3d.hub.open_drafter import ready_apart
from d3d.hub.open_model import OpenModel, TargetModel, open_model
from d3d.methods.async_.coordinator import Coordinator
from d3d.methods.async_.packed_pass import PackedDrafter
from d3d.methods.async_.placement import (
    TargetThreads,
    available_cores,
    check_placement,
    other_device,
    worker_cores,
)
from d3d.methods.async_.preparer import Preparer
from d3d.methods.async_.worker_link import Launch, WorkerLink
from d3d.methods.async_.workers import (
    ProcessWorker,
    ThreadWorker,
    on_one_core,
    on_own_stream,
    on_the_processor,
)
from d3d.model.drafter import DrafterModel

RESTARTS = 2
"""Most replacements of a worker between two requests."""

START_S = 300.0
"""Longest time in which a worker may load its drafter."""


@dataclass(frozen=True)
class StoredDrafter:
    """The files that a drafter was loaded from, for another process or device to load it again."""

    target: Path
    drafter: Path
    dtype: str
    device: str = "cpu"
    quantize: str | None = None

    def __call__(self) -> Preparer:
        base = open_model(
            str(self.target), device=self.device, dtype=self.dtype, quantize=self.quantize
        )
        return PackedDrafter(ready_apart(base, self.drafter, self.quantize), base.num_tokens)


@dataclass(frozen=True)
class Running:
    """A coordinator, and the limit on torch's threads while its worker drafts (None for no
    limit)."""

    coordinator: Coordinator
    threads: TargetThreads | None


def open_coordinator(
    placement: str, target: TargetModel, drafter: DrafterModel, drafter_path: Path | None
) -> Running:
    """Make a coordinator; the worker starts later (`Coordinator.ensure_worker`).

    drafter_path: the checkpoint that `drafter` came from. Raises InvalidRequest for a placement
    that this machine, target or drafter does not allow."""
    device = target.device
    check_placement(placement, device)
    if placement in ("thread", "streams"):
        preparer = PackedDrafter(drafter, target.num_tokens)
        if placement == "thread" and device.type == "cpu":
            left = min(torch.get_num_threads(), len(available_cores()) - 1)
            return Running(
                _coordinator(lambda: ThreadWorker(lambda: preparer, on_one_core)),
                TargetThreads(left),
            )
        setting = partial(on_own_stream, device) if placement == "streams" else on_the_processor
        return Running(_coordinator(lambda: ThreadWorker(lambda: preparer, setting)), None)
    if drafter_path is None:
        others = "use thread" if placement == "processes" else "use streams"
        raise InvalidRequest(
            f"placement: {placement} needs a drafter that was loaded from a checkpoint; load it "
            f"from one, or {others}"
        )
    stored = StoredDrafter(
        target.path,
        drafter_path,
        str(target.dtype).removeprefix("torch."),
        quantize=target.quantize if isinstance(target, OpenModel) else None,
    )
    if placement == "devices":
        other = other_device(device)
        stored = replace(stored, device=str(other))
        return Running(
            _coordinator(lambda: ThreadWorker(stored, partial(on_own_stream, other))), None
        )
    cores = available_cores()
    share = worker_cores(cores)
    left = min(torch.get_num_threads(), len(cores) - len(share))
    return Running(_coordinator(lambda: ProcessWorker(stored, share)), TargetThreads(left))


def _coordinator(launch: Launch) -> Coordinator:
    return Coordinator(WorkerLink(launch, restarts=RESTARTS, start_s=START_S))
