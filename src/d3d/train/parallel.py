"""Processes that share a training run: one alone, several that each hold all weights, or several
that shard the weights.

The trainer asks `Parallel` everything whose answer depends on the number of processes. All
processes of a run must ask the same questions in the same order."""

from __future__ import annotations

import gc
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor

from d3d.errors import InvalidRequest
from d3d.files import CONTINUED, explained, replace_directory, restore_interrupted
from d3d.train import state
from d3d.train.objective import AnswerObjective
from d3d.train.state import RunProgress, Trained

T = TypeVar("T")

PATIENCE_S = 1800.0
"""Longest wait for the other processes, in seconds, before an error. Includes the time in which one
of them saves or measures."""


class Parallel:
    """A run in one process; subclasses share it among several."""

    rank = 0
    """Number of this process, from 0; process 0 writes logs and checkpoints."""
    size = 1
    shards_weights = False
    state_name = "state.pt"
    """Name of the state in the run's directory."""

    def prepare(self, objective: AnswerObjective, compute_dtype: torch.dtype) -> None:
        """Prepare the parameters, before an optimizer holds them."""

    def share(self, work: Sequence[T]) -> Sequence[T]:
        """This process's part of the work; the parts are equal if the number of processes divides
        it."""
        return work

    def any(self, value: bool) -> bool:
        """True if it is true in any process."""
        return value

    def sums(self, *values: float) -> list[float]:
        """Each value summed over the processes."""
        return list(values)

    def gather(self, value: T) -> list[T]:
        """Every process's value, by rank."""
        return [value]

    def average_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Average each gradient over the processes, in place."""

    def whole(self, tensor: Tensor) -> Tensor:
        """The whole of a tensor that may be sharded."""
        return tensor

    def within(self, objective: AnswerObjective, work: Callable[[], T]) -> T:
        """Do work that calls the model outside of the objective's `forward`; every process must do
        the same."""
        return objective.within(work)

    def save(self, path: Path, trained: Trained, progress: RunProgress) -> None:
        """Write the state atomically."""
        state.write_file(path, trained, progress)

    def read_progress(self, path: Path) -> RunProgress:
        """Progress of a saved state. Raises InvalidRequest if it is damaged."""
        return state.file_progress(path)

    def load(self, path: Path, trained: Trained) -> None:
        """Restore weights and optimizer. Raises InvalidRequest if the state is damaged."""
        device = next(iter(trained.parameters.values())).device
        state.restore_file(state.read_file(path, device), trained)


class Replicated(Parallel):
    """Each process holds all weights and takes its share of the answers; gradients are averaged
    before the step."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def share(self, work: Sequence[T]) -> Sequence[T]:
        return work[self.rank :: self.size]

    def any(self, value: bool) -> bool:
        return self.sums(float(value))[0] > 0

    def sums(self, *values: float) -> list[float]:
        tensor = torch.tensor(values, dtype=torch.float64, device=self._device)
        dist.all_reduce(tensor)
        return list(map(float, tensor.tolist()))

    def gather(self, value: T) -> list[T]:
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def average_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        # the same order everywhere: a parameter without gradient here may have one elsewhere
        gradients = [
            torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            for parameter in parameters
        ]
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        dist.all_reduce(flat)
        flat /= self.size
        parts = flat.split([parameter.numel() for parameter in parameters])
        for parameter, part in zip(parameters, parts, strict=True):
            parameter.grad = part.view_as(parameter)

    def save(self, path: Path, trained: Trained, progress: RunProgress) -> None:
        if self.rank == 0:
            super().save(path, trained, progress)
        dist.barrier()


class Sharded(Replicated):
    """FSDP2: each process holds its part of the weights, gradients and optimizer states; a layer is
    whole while it is computed."""

    shards_weights, state_name = True, "state.parts"

    def prepare(self, objective: AnswerObjective, compute_dtype: torch.dtype) -> None:
        mesh = init_device_mesh(self._device.type, (self.size,))
        policy = MixedPrecisionPolicy(
            param_dtype=compute_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
        )
        for layer in objective.model.transformer.layers:
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(objective, mesh=mesh, mp_policy=policy)
        register_fsdp_forward_method(objective, "within")

    def average_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """The backward pass has done it."""

    def whole(self, tensor: Tensor) -> Tensor:
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

    def within(self, objective: AnswerObjective, work: Callable[[], T]) -> T:
        assert isinstance(objective, FSDPModule)
        try:
            return objective.within(work)
        finally:
            objective.reshard()  # embedding and head; layers reshard themselves

    def save(self, path: Path, trained: Trained, progress: RunProgress) -> None:
        partial = path.with_name(f".{path.name}.partial")
        with explained(path, CONTINUED):
            if self.rank == 0:
                state.STATE_PARTS.check_in(path, state.PROGRESS_FILE)
                restore_interrupted(path)
                shutil.rmtree(partial, ignore_errors=True)
                partial.mkdir()
            dist.barrier()
            state.write_parts(partial, trained)
            if self.rank == 0:
                state.write_progress(partial, progress)
                replace_directory(partial, path)
            dist.barrier()

    def read_progress(self, path: Path) -> RunProgress:
        return state.read_progress(path)

    def load(self, path: Path, trained: Trained) -> None:
        state.restore_parts(path, trained)


@contextmanager
def processes(device: str, patience_s: float = PATIENCE_S) -> Iterator[str]:
    """Join the processes that torchrun has started, if any, and yield this one's device: each gets
    its own GPU.

    Raises InvalidRequest if there are fewer GPUs than processes, or if `device` names one of
    them."""
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        yield device
        return
    if device.startswith("cuda:"):
        raise InvalidRequest(
            f"device: {device} is one GPU for all processes; use cuda, and each gets its own"
        )
    on_gpu = device == "cuda" or (device == "auto" and torch.cuda.is_available())
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if on_gpu:
        if local_rank >= torch.cuda.device_count():
            raise InvalidRequest(
                f"there are {torch.cuda.device_count()} GPUs, too few for one per process; start "
                "fewer processes"
            )
        torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl" if on_gpu else "gloo", timeout=timedelta(seconds=patience_s))
    try:
        yield f"cuda:{local_rank}" if on_gpu else "cpu"
        dist.barrier()  # no process takes the connections down while another uses them
    finally:
        dist.destroy_process_group()
        gc.collect()  # releases the group's threads before the interpreter ends


def choose_parallel(distribution: str, *, full_weights: bool, device: torch.device) -> Parallel:
    """The way in which `processes` share a run: `auto` shards weights if all of them are
    trained."""
    if not dist.is_initialized():
        return Parallel()
    if distribution == "fsdp" or (distribution == "auto" and full_weights):
        return Sharded(device)
    return Replicated(device)
