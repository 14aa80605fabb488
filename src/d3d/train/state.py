"""What a later run needs to go on from: one file where one process holds the weights, a directory
of parts where several share them."""

from __future__ import annotations

import dataclasses
import json
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from d3d.errors import InvalidRequest

if TYPE_CHECKING:
    from d3d.train.objective import AnswerObjective

IDENTITY = {
    "training configuration": "training",
    "drafter configuration": "drafter",
    "base": "base",
    "corpus": "corpus",
}
"""Name of an identity to its name in the file."""
PROGRESS_FILE = "progress.json"


@dataclass(frozen=True)
class Progress:
    """How far a run has come, and which run it is."""

    step: int
    slots_seen: int
    seconds: float
    identity: dict[str, str]


def write_file(
    path: Path, objective: AnswerObjective, optimizer: torch.optim.Optimizer, progress: Progress
) -> None:
    """Whole or not at all."""
    state = {
        "model": {
            name: parameter.detach() for name, parameter in objective.model.trainable().items()
        },
        "optimizer": optimizer.state_dict(),
        "progress": (progress.step, progress.slots_seen, progress.seconds),
        **{IDENTITY[name]: value for name, value in progress.identity.items()},
    }
    partial = path.with_name(path.name + ".partial")
    torch.save(state, partial)
    partial.replace(path)


def read_file(path: Path, device: torch.device | str) -> dict[str, Any]:
    """Raises InvalidRequest where it is damaged."""
    try:
        state: dict[str, Any] = torch.load(path, map_location=device, weights_only=True)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise InvalidRequest(f"{path} is damaged ({error}); remove it to start again") from error
    return state


def file_progress(state: dict[str, Any]) -> Progress:
    step, slots_seen, seconds = state["progress"]
    return Progress(
        step,
        slots_seen,
        seconds,
        {name: state[key] for name, key in IDENTITY.items() if key in state},
    )


@torch.no_grad()
def restore_file(
    state: dict[str, Any], objective: AnswerObjective, optimizer: torch.optim.Optimizer
) -> None:
    for name, parameter in objective.model.trainable().items():
        parameter.copy_(state["model"][name])
    optimizer.load_state_dict(state["optimizer"])


def write_parts(
    directory: Path, objective: AnswerObjective, optimizer: torch.optim.Optimizer
) -> None:
    """Every process writes its own part (`torch.distributed.checkpoint`)."""
    from torch.distributed.checkpoint.state_dict_saver import save

    save(_parts(objective, optimizer), checkpoint_id=directory)


def restore_parts(
    directory: Path, objective: AnswerObjective, optimizer: torch.optim.Optimizer
) -> None:
    """Every process reads its own part, whoever wrote it. Raises InvalidRequest where it is
    damaged."""
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict_loader import load

    try:
        load(_parts(objective, optimizer), checkpoint_id=directory)
    except (OSError, RuntimeError, EOFError, CheckpointException) as error:
        raise InvalidRequest(
            f"{directory} is damaged ({error}); remove it to start again"
        ) from error


def _parts(objective: AnswerObjective, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The tensors themselves, so that loading fills them in place. An optimizer that has not
    stepped yet gets the state that its first step would begin with (torch's own helper takes a step
    of length 0 for that, which counts as one ever after)."""
    trainable = objective.model.trainable()
    for parameter in trainable.values():
        if not optimizer.state[parameter]:
            optimizer.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                "exp_avg": torch.zeros_like(parameter, requires_grad=False),
                "exp_avg_sq": torch.zeros_like(parameter, requires_grad=False),
            }
    return {
        "model": {name: parameter.detach() for name, parameter in trainable.items()},
        "optimizer": {
            name: dict(optimizer.state[parameter]) for name, parameter in trainable.items()
        },
    }


def write_progress(directory: Path, progress: Progress) -> None:
    (directory / PROGRESS_FILE).write_text(
        json.dumps(dataclasses.asdict(progress)), encoding="utf-8"
    )


def read_progress(directory: Path) -> Progress:
    """Raises InvalidRequest where it is damaged."""
    try:
        return Progress(**json.loads((directory / PROGRESS_FILE).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise InvalidRequest(
            f"{directory} is damaged ({error}); remove it to start again"
        ) from error
