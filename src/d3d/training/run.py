"""A training run in a directory: state to go on from, a log, and the best checkpoint so far.

state.pt    everything that going on needs
log.jsonl   losses and held-out acceptance, one JSON object a line
best/       the drafter that measured best on the held-out answers
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from d3d.core.errors import InvalidRequest
from d3d.masks.rules import BlockAttention
from d3d.models.checkpoint import save_drafter
from d3d.models.drafter import Alignment, DeltaConfig, DrafterConfig, DrafterModel
from d3d.models.from_target import from_target
from d3d.models.open_model import OpenModel
from d3d.training.corpus import Sample
from d3d.training.evaluate import Acceptance, replay
from d3d.training.trainer import StepStats, TrainConfig, Trainer


class DrafterSpec(BaseModel):
    """What drafter to make of the target."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    block_size: int = 16
    block_attention: BlockAttention = "causal"
    alignment: Alignment = "next"
    mask_token_id: int | None = None
    kept_layers: tuple[int, ...] | None = None
    """None keeps all."""
    delta: DeltaConfig | None = DeltaConfig(rank=64)

    def resolve(self, num_layers: int) -> DrafterConfig:
        fields = self.model_dump() | {"kept_layers": self.kept_layers or tuple(range(num_layers))}
        return DrafterConfig.model_validate(fields)


class RunConfig(BaseModel):
    """A training configuration file."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    drafter: DrafterSpec = DrafterSpec()
    train: TrainConfig = TrainConfig()
    evaluate_every: int = 400
    evaluate_draft_length: int = 8


def read_run_config(path: Path) -> RunConfig:
    """From YAML. Raises InvalidRequest that names the key."""
    try:
        return RunConfig.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")) or {})
    except (OSError, yaml.YAMLError) as error:
        raise InvalidRequest(f"{path} can't be read: {error}") from error
    except ValidationError as error:
        first = error.errors()[0]
        raise InvalidRequest(f"{path}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from error


class TrainingRun:
    """Starts a run, or goes on with one that was interrupted."""

    def __init__(self, directory: Path, base: OpenModel, config: RunConfig, samples: list[Sample], held_out: list[Sample]) -> None:
        self.directory, self.base, self.config, self.held_out = directory, base, config, held_out
        self.model: DrafterModel = from_target(base.transformer, config.drafter.resolve(base.config.num_layers), seed=config.train.seed)
        self.trainer = Trainer(self.model, samples, config.train)
        self.best = 0.0
        self.acceptance: Acceptance | None = None
        self._state = directory / "state.pt"
        directory.mkdir(parents=True, exist_ok=True)
        if self._state.exists():
            self.trainer.load(self._state)
            self.best = max((row.get("acceptance_length", 0.0) for row in self._log_rows()), default=0.0)

    def run(self, on_step: Callable[[StepStats], None], *, stop: Callable[[], bool] = lambda: False) -> None:
        """Train, evaluate and save until the end or `stop`."""

        def after(stats: StepStats) -> None:
            on_step(stats)
            if stats.step % self.config.evaluate_every == 0 or stats.step == self.config.train.steps:
                self.evaluate(stats)

        try:
            self.trainer.run(after, stop=stop)
        finally:
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
        with (self.directory / "log.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")

    def _provenance(self, row: dict[str, Any]) -> dict[str, Any]:
        return {
            "target": self.base.source,
            "answers": len(self.trainer.samples),
            "sources": _count([sample.source for sample in self.trainer.samples]),
            "config": self.config.model_dump(mode="json"),
            "held_out": {"answers": len(self.held_out), "draft_length": self.config.evaluate_draft_length},
            "measured": row,
        }

    def _log_rows(self) -> list[dict[str, Any]]:
        log = self.directory / "log.jsonl"
        return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


def _count(names: list[str]) -> dict[str, int]:
    return {name: names.count(name) for name in sorted(set(names))}
