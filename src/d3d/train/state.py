"""State of a run on disk: one file if a process holds all weights, a directory of parts if several
share them."""

from __future__ import annotations

import dataclasses
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from pydantic import TypeAdapter, ValidationError
from torch import nn

from d3d.errors import InvalidRequest, first_problem
from d3d.files import CONTINUED, PARTIAL_SUFFIX, FileKind, explained
from d3d.inputs import read_json
from d3d.json_text import to_json

IDENTITY = {
    "training configuration": "training",
    "drafter configuration": "drafter",
    "base": "base",
    "corpus": "corpus",
}
"""Names of the identities, and their keys in the file."""
PROGRESS_FILE = "progress.json"
STATE_PARTS = FileKind("the state of a training run", ("step", "slots_seen", "seconds"))


@dataclass(frozen=True)
class RunProgress:
    """Progress of a run, and its identity."""

    step: int
    slots_seen: int
    seconds: float
    identity: dict[str, str]


class Trained(NamedTuple):
    """Weights of a run, and their optimizer."""

    parameters: dict[str, nn.Parameter]
    optimizer: torch.optim.Optimizer

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: parameter.detach() for name, parameter in self.parameters.items()}


def write_file(path: Path, trained: Trained, progress: RunProgress) -> None:
    """Write the state atomically. Raises CantWrite."""
    state = {
        "model": trained.weights(),
        "optimizer": trained.optimizer.state_dict(),
        "progress": (progress.step, progress.slots_seen, progress.seconds),
        **{IDENTITY[name]: value for name, value in progress.identity.items()},
    }
    partial = path.with_name(path.name + PARTIAL_SUFFIX)
    with explained(path, CONTINUED):
        try:
            torch.save(state, partial)
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)


def read_file(path: Path, device: torch.device | str) -> dict[str, Any]:
    """Read a state. Raises InvalidRequest if it is damaged."""
    try:
        state: dict[str, Any] = torch.load(path, map_location=device, weights_only=True)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise _damaged(path, error) from error
    return state


def _damaged(path: Path, error: object) -> InvalidRequest:
    return InvalidRequest(
        f"{path} is damaged, or not the state of a run ({error}); move it away to start again"
    )


def file_progress(path: Path) -> RunProgress:
    """Progress in a state. Raises InvalidRequest if it is damaged, or no state."""
    state = read_file(path, "cpu")
    try:
        step, slots_seen, seconds = state["progress"]
    except (KeyError, TypeError, ValueError) as error:
        raise _damaged(path, error) from error
    identity = {name: state[key] for name, key in IDENTITY.items() if key in state}
    return RunProgress(step, slots_seen, seconds, identity)


@torch.no_grad()
def restore_file(state: dict[str, Any], trained: Trained) -> None:
    for name, parameter in trained.parameters.items():
        parameter.copy_(state["model"][name])
    trained.optimizer.load_state_dict(state["optimizer"])


def write_parts(directory: Path, trained: Trained) -> None:
    """Write this process's part (`torch.distributed.checkpoint`)."""
    from torch.distributed.checkpoint.state_dict_saver import save

    save(_parts(trained), checkpoint_id=directory)


def restore_parts(directory: Path, trained: Trained) -> None:
    """Read this process's part, whichever process wrote it. Raises InvalidRequest if it is
    damaged."""
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict_loader import load

    try:
        load(_parts(trained), checkpoint_id=directory)
    except (OSError, RuntimeError, EOFError, CheckpointException) as error:
        raise _damaged(directory, error) from error


def _parts(trained: Trained) -> dict[str, Any]:
    """The tensors themselves, which loading fills in place. An optimizer that has not stepped yet
    gets the initial state of its first step (torch's own helper takes a step of length 0 instead,
    which counts from then on)."""
    moments = trained.optimizer.state
    for parameter in trained.parameters.values():
        if not moments[parameter]:
            moments[parameter] = {
                "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                "exp_avg": torch.zeros_like(parameter, requires_grad=False),
                "exp_avg_sq": torch.zeros_like(parameter, requires_grad=False),
            }
    optimizer = {name: dict(moments[value]) for name, value in trained.parameters.items()}
    return {"model": trained.weights(), "optimizer": optimizer}


def write_progress(directory: Path, progress: RunProgress) -> None:
    content = to_json(dataclasses.asdict(progress))
    (directory / PROGRESS_FILE).write_text(content, encoding="utf-8")


def read_progress(directory: Path) -> RunProgress:
    """Progress stored beside the parts. Raises InvalidRequest if it is damaged."""
    file = directory / PROGRESS_FILE
    content = read_json(file, "remove the directory to start again")
    try:
        return TypeAdapter(RunProgress).validate_python(content)
    except ValidationError as error:
        raise _damaged(file, first_problem(error)) from error
