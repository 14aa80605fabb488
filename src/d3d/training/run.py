"""A training run in a directory: state to go on from, a log, and the best checkpoint so far.

state.pt    everything that going on needs
log.jsonl   losses and held-out acceptance, one JSON object a line
best/       the drafter that measured best on the held-out answers
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from d3d.core.errors import D3DError, InvalidRequest
from d3d.masks.rules import BlockAttention
from d3d.models.checkpoint import check_mask_token, restore_interrupted, save_drafter
from d3d.models.drafter import Alignment, DeltaConfig, DrafterConfig, DrafterModel
from d3d.models.from_target import from_target
from d3d.models.open_model import OpenModel
from d3d.training.corpus import Sample, drop_torn_line
from d3d.training.evaluate import Acceptance, replay
from d3d.training.trainer import StepStats, TrainConfig, Trainer

STATE_EVERY_S = 300.0
"""A run that is killed loses at most this much, in seconds."""


class DrafterSpec(BaseModel):
    """What drafter to make of the target."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    block_size: int = Field(16, ge=2, le=256)
    block_attention: BlockAttention = "causal"
    alignment: Alignment = "next"
    mask_token_id: int | None = None
    kept_layers: tuple[int, ...] | None = None
    """None keeps all."""
    delta: DeltaConfig | None = DeltaConfig(rank=64)
    previous_token_rank: int | None = None

    def resolve(self, num_layers: int) -> DrafterConfig:
        """Raises InvalidRequest for layers in another order, or none."""
        fields = self.model_dump() | {"kept_layers": tuple(range(num_layers)) if self.kept_layers is None else self.kept_layers}
        try:
            return DrafterConfig.model_validate(fields)
        except ValidationError as error:
            raise InvalidRequest(f"drafter: {first_problem(error)}") from error


class RunConfig(BaseModel):
    """A training configuration file."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    drafter: DrafterSpec = DrafterSpec()
    train: TrainConfig = TrainConfig()
    evaluate_every: int = Field(400, ge=1, description="steps; the last one is measured too")
    evaluate_draft_length: int = Field(8, ge=1)

    @model_validator(mode="after")
    def _fits_the_block(self) -> RunConfig:
        if self.evaluate_draft_length > self.drafter.block_size:
            raise ValueError(
                f"evaluate_draft_length ({self.evaluate_draft_length}) is above the drafter's block_size ({self.drafter.block_size})"
            )
        return self


def read_run_config(path: Path) -> RunConfig:
    """From YAML. Raises InvalidRequest that names the key."""
    try:
        return RunConfig.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")) or {})
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise InvalidRequest(f"{path} can't be read: {error}") from error
    except ValidationError as error:
        raise InvalidRequest(f"{path}: {first_problem(error)}") from error


def first_problem(error: ValidationError) -> str:
    """Key and message of the first thing that is wrong."""
    first = error.errors()[0]
    name, message = ".".join(map(str, first["loc"])), first["msg"].removeprefix("Value error, ")
    if first["type"] == "extra_forbidden":
        message = "there is no such key"
    return f"{name}: {message}" if name else message


class TrainingRun:
    """Starts a run, or goes on with one that was interrupted."""

    def __init__(self, directory: Path, base: OpenModel, config: RunConfig, samples: list[Sample], held_out: list[Sample]) -> None:
        """Samples whose prompt is held out too are not trained on. Raises InvalidRequest and InvalidCheckpoint as its parts do."""
        measured = {tuple(sample.prompt_ids) for sample in held_out}
        if not any(len(sample.answer_ids) > 1 for sample in held_out):
            raise InvalidRequest("the held-out corpus has no answer of two tokens or more, so nothing can be measured")
        self.directory, self.base, self.config, self.held_out = directory, base, config, held_out
        drafter = config.drafter.resolve(base.config.num_layers)
        check_mask_token(drafter, base)
        self.model: DrafterModel = from_target(base.transformer, drafter, seed=config.train.seed)
        training = [sample for sample in samples if tuple(sample.prompt_ids) not in measured]
        self.trainer = Trainer(self.model, training, config.train)
        self.left_out = dict(self.trainer.left_out)
        """How many samples are not trained on, for each reason."""
        if len(training) < len(samples):
            self.left_out["their prompt is held out"] = len(samples) - len(training)
        self.best = 0.0
        self.acceptance: Acceptance | None = None
        self._state = directory / "state.pt"
        directory.mkdir(parents=True, exist_ok=True)
        if self._state.exists():
            self.trainer.load(self._state)
            self.best = _measured(directory / "best")

    def run(self, on_step: Callable[[StepStats], None], *, stop: Callable[[], bool] = lambda: False) -> None:
        """Train, evaluate and save until the end or `stop`. What else interrupts it costs the steps since the last save: it may
        come in the middle of a step, whose state is worth nothing."""
        saved = time.monotonic()

        def after(stats: StepStats) -> None:
            nonlocal saved
            on_step(stats)
            if stats.step % self.config.evaluate_every == 0 or stats.step == self.config.train.steps:
                self.evaluate(stats)
            elif time.monotonic() - saved > STATE_EVERY_S:
                self.trainer.save(self._state)
            else:
                return
            saved = time.monotonic()

        try:
            self.trainer.run(after, stop=stop)
        except D3DError:
            self.trainer.save(self._state)
            raise
        self.trainer.save(self._state)

    def evaluate(self, stats: StepStats) -> None:
        """Measure, log, and keep the checkpoint if it is the best so far."""
        self.model.eval()
        self.acceptance = replay(self.model, self.held_out, self.config.evaluate_draft_length)
        length = self.acceptance.acceptance_length
        row = {
            "step": stats.step,
            "loss": stats.loss,
            "slots": self.trainer.slots_seen,
            "seconds": self.trainer.seconds,
            "acceptance_length": length,
            "acceptance_at": self.acceptance.acceptance_at,
        }
        if length > self.best:
            self.best = length
            save_drafter(self.directory / "best", self.model, self.base, provenance=self._provenance(row))
        self.trainer.save(self._state)
        log = self.directory / "log.jsonl"
        if log.exists():
            drop_torn_line(log)
        with log.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    def _provenance(self, row: dict[str, Any]) -> dict[str, Any]:
        return {
            "target": self.base.source,
            "answers": len(self.trainer.samples),
            "sources": dict(sorted(Counter(sample.source for sample in self.trainer.samples).items())),
            "config": self.config.model_dump(mode="json"),
            "held_out": {"answers": len(self.held_out), "draft_length": self.config.evaluate_draft_length},
            "measured": row,
        }


def _measured(checkpoint: Path) -> float:
    """Acceptance length of the best checkpoint so far, 0 where there is none: from the checkpoint itself, so that the two agree."""
    restore_interrupted(checkpoint)
    file = checkpoint / "provenance.json"
    return float(json.loads(file.read_text(encoding="utf-8"))["measured"]["acceptance_length"]) if file.is_file() else 0.0
