"""The processes that share a training run: one alone, several with whole weights each, or several
that share the weights out.

The trainer asks every question here that has another answer with several processes; the rest of it
does not know of them. All of a run's processes must ask the same questions in the same order."""

from __future__ import annotations

import gc
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol, TypeVar

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
from d3d.hub.checkpoint import replace_directory, restore_interrupted
from d3d.train.objective import AnswerObjective
from d3d.train.state import (
    Progress,
    file_progress,
    read_file,
    read_progress,
    restore_file,
    restore_parts,
    write_file,
    write_parts,
    write_progress,
)

T = TypeVar("T")

PATIENCE_S = 1800.0
"""Longest that a process waits for the others, in seconds; then it ends with an error. Saving and
measuring happen in between."""


class Parallel(Protocol):
    """Processes that train one drafter."""

    rank: int
    """This one's number, from 0; 0 writes logs and checkpoints."""
    size: int
    shards_weights: bool
    state_name: str
    """Name of the state in the run's directory."""

    def prepare(self, objective: AnswerObjective, compute_dtype: torch.dtype) -> None:
        """Make the parameters ready, before an optimizer holds them."""

    def share(self, work: Sequence[T]) -> Sequence[T]:
        """This process's part; all parts are of one size where the number of processes divides that
        of the work."""

    def any(self, value: bool) -> bool:
        """Whether it is true in any process."""

    def sums(self, *values: float) -> list[float]:
        """Each summed over the processes."""

    def gather(self, value: T) -> list[T]:
        """Every process's value, by rank."""

    def average_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Each gradient's mean over the processes, in place."""

    def whole(self, tensor: Tensor) -> Tensor:
        """A tensor that may be shared out, whole."""

    def within(self, objective: AnswerObjective, work: Callable[[], T]) -> T:
        """Do work that calls the model without its objective around it, in every process alike."""

    def save(
        self,
        path: Path,
        objective: AnswerObjective,
        optimizer: torch.optim.Optimizer,
        progress: Progress,
    ) -> None:
        """Whole or not at all."""

    def read_progress(self, path: Path) -> Progress:
        """Raises InvalidRequest where the state is damaged."""

    def load(
        self, path: Path, objective: AnswerObjective, optimizer: torch.optim.Optimizer
    ) -> None:
        """Fill weights and optimizer. Raises InvalidRequest where the state is damaged."""


class Alone:
    """One process."""

    rank, size, shards_weights, state_name = 0, 1, False, "state.pt"

    def prepare(self, objective: AnswerObjective, compute_dtype: torch.dtype) -> None:
        pass

    def share(self, work: Sequence[T]) -> Sequence[T]:
        return work

    def any(self, value: bool) -> bool:
        return value

    def sums(self, *values: float) -> list[float]:
        return list(values)

    def gather(self, value: T) -> list[T]:
        return [value]

    def average_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        pass

    def whole(self, tensor: Tensor) -> Tensor:
        return tensor

    def within(self, objective: AnswerObjective, work: Callable[[], T]) -> T:
        return objective.within(work)

    def save(
        self,
        path: Path,
        objective: AnswerObjective,
        optimizer: torch.optim.Optimizer,
        progress: Progress,
    ) -> None:
        write_file(path, objective, optimizer, progress)

    def read_progress(self, path: Path) -> Progress:
        return file_progress(read_file(path, "cpu"))

    def load(
        self, path: Path, objective: AnswerObjective, optimizer: torch.optim.Optimizer
    ) -> None:
        restore_file(read_file(path, objective.model.transformer.device), objective, optimizer)


class Replicated(Alone):
    """Every process holds all weights and takes its share of the answers; gradients are averaged
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
        for parameter in parameters:  # the same order everywhere; one that no loss reached here may have been reached elsewhere
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        flat = torch.cat(
            [parameter.grad.flatten() for parameter in parameters if parameter.grad is not None]
        )
        dist.all_reduce(flat)
        flat /= self.size
        parts = flat.split([parameter.numel() for parameter in parameters])
        for parameter, part in zip(parameters, parts, strict=True):
            parameter.grad = part.view_as(parameter)

    def save(
        self,
        path: Path,
        objective: AnswerObjective,
        optimizer: torch.optim.Optimizer,
        progress: Progress,
    ) -> None:
        if self.rank == 0:
            write_file(path, objective, optimizer, progress)
        dist.barrier()


class Sharded(Replicated):
    """FSDP2: every process holds its part of the weights, gradients and optimizer states; a layer
    is whole while it is computed."""

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
        """Backward has done it."""

    def whole(self, tensor: Tensor) -> Tensor:
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

    def within(self, objective: AnswerObjective, work: Callable[[], T]) -> T:
        assert isinstance(objective, FSDPModule)
        try:
            return objective.within(work)
        finally:
            objective.reshard()  # embedding and head; a layer does it for itself

    def save(
        self,
        path: Path,
        objective: AnswerObjective,
        optimizer: torch.optim.Optimizer,
        progress: Progress,
    ) -> None:
        partial = path.with_name(f".{path.name}.partial")
        if self.rank == 0:
            restore_interrupted(path)
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir()
        dist.barrier()
        write_parts(partial, objective, optimizer)
        if self.rank == 0:
            write_progress(partial, progress)
            replace_directory(partial, path)
        dist.barrier()

    def read_progress(self, path: Path) -> Progress:
        return read_progress(path)

    def load(
        self, path: Path, objective: AnswerObjective, optimizer: torch.optim.Optimizer
    ) -> None:
        restore_parts(path, objective, optimizer)


@contextmanager
def processes(device: str, patience_s: float = PATIENCE_S) -> Iterator[str]:
    """Join the processes that torchrun has started, where it has: yields the device to use, each
    process its own GPU.

    Raises InvalidRequest where there are fewer GPUs than processes, or the device names one of them
    for all."""
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
                f"there are {torch.cuda.device_count()} GPUs, too few for one a process; start fewer processes"
            )
        torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl" if on_gpu else "gloo", timeout=timedelta(seconds=patience_s))
    try:
        yield f"cuda:{local_rank}" if on_gpu else "cpu"
        dist.barrier()  # nobody takes the connections down while another still uses them
    finally:
        dist.destroy_process_group()
        gc.collect()  # what has worked with a group lets go of its threads before the interpreter ends


def choose_parallel(distribution: str, *, full_weights: bool, device: torch.device) -> Parallel:
    """How `processes` share a run: `auto` shares weights out where all of them are trained."""
    if not dist.is_initialized():
        return Alone()
    if distribution == "fsdp" or (distribution == "auto" and full_weights):
        return Sharded(device)
    return Replicated(device)
