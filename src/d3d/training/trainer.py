"""The trainer: one answer a pass, many blocks an answer, a few answers a step.

It knows a drafter, samples and a schedule. Everything that a later run needs to go on is in one state file, written whole.
"""

from __future__ import annotations

import math
import pickle
import random
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor

from d3d.core.errors import InvalidRequest
from d3d.models.drafter import DrafterModel
from d3d.training.corpus import Sample
from d3d.training.losses import Weighting
from d3d.training.objective import AnswerLoss, answer_loss

MIN_ANSWER = 3
"""An anchor, its next token, and one that a slot predicts."""


class Stage(BaseModel):
    """Blocks of one size for a share of the steps."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    share: float = Field(gt=0.0, le=1.0)
    block_size: int = Field(ge=2)
    anchors: int = Field(ge=1, description="blocks hung in each answer, at random places")
    decay: float = Field(4.0, gt=0.0, description="slots over which the loss falls by e, where `weighting` is decay")


class TrainConfig(BaseModel):
    """How a drafter is trained."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    steps: int = Field(2000, ge=1)
    answers_per_step: int = Field(2, ge=1)
    learning_rate: float = Field(1e-3, gt=0.0)
    warmup: int = Field(50, ge=0)
    ar_weight: float = Field(0.3, ge=0.0, description="weight of the clean rows' next-token loss, where they learn at all")
    weighting: Weighting = "decay"
    distillation: float = Field(0.0, ge=0.0, le=1.0, description="share of the target's own distribution in the label")
    max_length: int = Field(512, ge=8, description="longer texts are cut")
    clip: float = Field(1.0, gt=0.0)
    seed: int = 0
    stages: tuple[Stage, ...] = Field(
        (Stage(share=0.6, block_size=6, anchors=120, decay=4.0), Stage(share=0.4, block_size=16, anchors=40, decay=5.0)), min_length=1
    )

    @model_validator(mode="after")
    def _shares_are_whole(self) -> TrainConfig:
        if abs(sum(stage.share for stage in self.stages) - 1) > 1e-6:
            raise ValueError(f"the shares of the stages must sum to 1, not {sum(stage.share for stage in self.stages):g}")
        return self

    def stage(self, step: int) -> Stage:
        """The stage that `step` (from 0) belongs to."""
        end = 0.0
        for stage in self.stages:
            end += stage.share * self.steps
            if step < end:
                return stage
        return self.stages[-1]

    def learning_rate_at(self, step: int) -> float:
        """Linear warm-up, then a cosine down to a twentieth."""
        if step < self.warmup:
            return self.learning_rate * (step + 1) / self.warmup
        done = (step - self.warmup) / max(1, self.steps - self.warmup)
        return self.learning_rate * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * done)))


class StepStats(NamedTuple):
    """One optimizer step."""

    step: int
    loss: float
    slots: int
    seconds: float


class Trainer:
    """Trains `model` on `samples`; `run` may be interrupted and goes on from the last `save`."""

    def __init__(self, model: DrafterModel, samples: list[Sample], config: TrainConfig) -> None:
        """Raises InvalidRequest where no sample can be used, or a stage wants longer blocks than the drafter has."""
        self.model, self.config = model, config
        self.samples, self.left_out = usable(samples, config.max_length)
        largest = max(stage.block_size for stage in config.stages)
        if largest > model.config.block_size:
            raise InvalidRequest(f"train.stages: a block_size of {largest} is above the drafter's own, {model.config.block_size}")
        if config.distillation > 0 and not model.config.clean_rows_are_base:
            raise InvalidRequest("train.distillation needs clean rows that are the target's own: deltas with scope slots")
        for parameter in model.trainable().values():
            parameter.data = parameter.data.float()
        self.optimizer = torch.optim.AdamW(
            model.trainable().values(), lr=config.learning_rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True
        )
        self.step = 0
        self.slots_seen = 0
        self.seconds = 0.0

    def run(self, on_step: Callable[[StepStats], None], *, stop: Callable[[], bool] = lambda: False) -> None:
        """Train to the end, or until `stop`. Raises InvalidRequest that names step and sample where a loss or a gradient is not
        finite; the weights are then those of the step before."""
        while self.step < self.config.steps and not stop():
            on_step(self._one_step())

    def _one_step(self) -> StepStats:
        started = time.perf_counter()
        rng = random.Random(f"{self.config.seed}/{self.step}")
        stage = self.config.stage(self.step)
        total, slots = 0.0, 0
        self.optimizer.zero_grad(set_to_none=False)
        drawn = self._draw()
        for index in drawn:
            loss, count = self._loss(self.samples[index], stage, rng)
            self._check_finite("loss", loss, [index])
            (loss / self.config.answers_per_step).backward()
            total, slots = total + loss.item() / self.config.answers_per_step, slots + count
        norm = torch.nn.utils.clip_grad_norm_(self.model.trainable().values(), self.config.clip)
        self._check_finite("gradient", norm, drawn)
        for group in self.optimizer.param_groups:
            group["lr"] = self.config.learning_rate_at(self.step)
        self.optimizer.step()
        self.step += 1
        self.slots_seen += slots
        seconds = time.perf_counter() - started
        self.seconds += seconds
        return StepStats(self.step, total, slots, seconds)

    def _check_finite(self, what: str, value: Tensor, indices: list[int]) -> None:
        if not math.isfinite(value.item()):
            names = ", ".join(f"{index} ({self.samples[index].source})" for index in indices)
            raise InvalidRequest(f"the {what} is not finite in step {self.step}, sample {names} of the corpus; lower the learning rate")

    def _draw(self) -> list[int]:
        """Samples of this step: each epoch is a fresh shuffle."""
        per_step, size = self.config.answers_per_step, len(self.samples)
        chosen = []
        for number in range(self.step * per_step, (self.step + 1) * per_step):
            order = list(range(size))
            random.Random(f"{self.config.seed}/epoch/{number // size}").shuffle(order)
            chosen.append(order[number % size])
        return chosen

    def _loss(self, sample: Sample, stage: Stage, rng: random.Random) -> AnswerLoss:
        token_ids = torch.tensor(sample.token_ids[: self.config.max_length], device=self.model.transformer.device)
        first = len(sample.prompt_ids)
        places = range(first, len(token_ids) - MIN_ANSWER + 1)
        anchors = sorted(rng.sample(places, min(stage.anchors, len(places))))
        return answer_loss(self.model, token_ids, first, anchors, stage, self.config)

    def save(self, path: Path) -> None:
        """Write everything that going on needs, whole or not at all."""
        state = {
            "model": {name: parameter.detach() for name, parameter in self.model.trainable().items()},
            "optimizer": self.optimizer.state_dict(),
            "progress": (self.step, self.slots_seen, self.seconds),
            **self._identity(),
        }
        partial = path.with_name(path.name + ".partial")
        torch.save(state, partial)
        partial.replace(path)

    def load(self, path: Path) -> None:
        """Go on from `save`. Raises InvalidRequest where the file is damaged, or the drafter or the configuration is another."""
        try:
            state = torch.load(path, map_location=self.model.transformer.device, weights_only=True)
        except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
            raise InvalidRequest(f"{path} is damaged ({error}); remove it to start again") from error
        for name, value in self._identity().items():
            if state.get(name) != value:
                raise InvalidRequest(f"{path} belongs to a run with another {name} configuration; choose another output directory")
        with torch.no_grad():
            for name, parameter in self.model.trainable().items():
                parameter.copy_(state["model"][name])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.slots_seen, self.seconds = state["progress"]

    def _identity(self) -> dict[str, str]:
        """What a run must have in common with the state that it goes on from."""
        return {"training": self.config.model_dump_json(), "drafter": self.model.config.model_dump_json()}


def usable(samples: list[Sample], max_length: int) -> tuple[list[Sample], dict[str, int]]:
    """The samples that can be trained on, and how many can't for each reason. Raises InvalidRequest where none can."""
    good, left_out = [], Counter[str]()
    for sample in samples:
        if not sample.prompt_ids:
            left_out["the prompt is empty"] += 1
        elif len(sample.answer_ids) < MIN_ANSWER:
            left_out[f"the answer has fewer than {MIN_ANSWER} tokens"] += 1
        elif len(sample.prompt_ids) + MIN_ANSWER > max_length:
            left_out[f"the prompt leaves no room for an answer in a max_length of {max_length}"] += 1
        else:
            good.append(sample)
    if not good:
        reasons = "; ".join(f"{count} because {reason}" for reason, count in left_out.items())
        raise InvalidRequest(f"the corpus has no sample that can be trained on: {reasons or 'it is empty'}")
    return good, dict(left_out)
