"""From a target and its drafter to a coordinator with a worker behind it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from d3d.core.errors import InvalidRequest
from d3d.core.protocols import Preparer
from d3d.drafting.packed_pass import PackedDrafter
from d3d.models.checkpoint import load_drafter
from d3d.models.drafter import DrafterModel
from d3d.models.linear import pack_weights
from d3d.models.open_model import OpenModel, open_model
from d3d.runtime.coordinator import Coordinator
from d3d.runtime.placement import TargetThreads, available_cores, check_placement, worker_cores
from d3d.runtime.worker_link import Launch, WorkerLink
from d3d.runtime.workers import ProcessWorker, ThreadWorker

RESTARTS = 2
"""How often a worker is replaced during a request."""

START_S = 300.0
"""A worker that has not loaded its drafter by then is given up."""


@dataclass(frozen=True)
class StoredDrafter:
    """A drafter by the files that it is made of: what a process of its own can load."""

    target: Path
    drafter: Path
    dtype: str

    def __call__(self) -> Preparer:
        base = open_model(str(self.target), device="cpu", dtype=self.dtype)
        model = load_drafter(self.drafter, base)
        pack_weights(model)
        return PackedDrafter(model, base.config.vocab_size)


@dataclass(frozen=True)
class Running:
    """A coordinator, and the threads that torch may use beside its worker (None: as many as before)."""

    coordinator: Coordinator
    threads: TargetThreads | None


def open_coordinator(placement: str, target: OpenModel, drafter: DrafterModel, drafter_path: Path | None) -> Running:
    """Nothing runs yet. `drafter_path`: the checkpoint that `drafter` came from. Raises InvalidRequest for a placement that is not to be
    had here."""
    check_placement(placement, target.transformer.device)
    if placement == "thread":
        preparer = PackedDrafter(drafter, target.config.vocab_size)
        return Running(_coordinator(lambda: ThreadWorker(lambda: preparer)), None)
    if drafter_path is None:
        raise InvalidRequest("placement: processes needs a drafter that was loaded from a checkpoint; load it from one, or use thread")
    stored = StoredDrafter(target.path, drafter_path, str(target.transformer.dtype).removeprefix("torch."))
    cores = available_cores()
    share = worker_cores(cores)
    left = min(torch.get_num_threads(), len(cores) - len(share))
    return Running(_coordinator(lambda: ProcessWorker(stored, share)), TargetThreads(left))


def _coordinator(launch: Launch) -> Coordinator:
    return Coordinator(WorkerLink(launch, restarts=RESTARTS, start_s=START_S))
