"""The trainer: one answer a pass, many blocks an answer, a few answers a step.

It knows a drafter, samples and a schedule. Everything that a later run needs to go on is in one state file, written whole.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from d3d.core.errors import InvalidRequest
from d3d.models.drafter import DrafterModel
from d3d.training.blocks import clean_pass, hang_blocks, joint_pass, slot_pass
from d3d.training.corpus import Sample
from d3d.training.losses import head_loss, position_weights


class Stage(BaseModel):
    """Blocks of one size for a share of the steps."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    share: float = Field(gt=0.0, le=1.0)
    block_size: int = Field(ge=2)
    anchors: int = Field(ge=1, description="blocks hung in each answer, at random places")
    gamma: float = Field(gt=0.0, description="position decay of the loss")


class TrainConfig(BaseModel):
    """How a drafter is trained."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    steps: int = Field(2000, ge=1)
    answers_per_step: int = Field(2, ge=1)
    learning_rate: float = Field(1e-3, gt=0.0)
    warmup: int = Field(50, ge=0)
    ar_weight: float = Field(0.3, ge=0.0, description="weight of the clean rows' next-token loss, where they learn at all")
    max_length: int = Field(512, ge=8, description="longer texts are cut")
    clip: float = Field(1.0, gt=0.0)
    seed: int = 0
    stages: tuple[Stage, ...] = (
        Stage(share=0.6, block_size=6, anchors=120, gamma=4.0),
        Stage(share=0.4, block_size=16, anchors=40, gamma=5.0),
    )

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
        self.model, self.config = model, config
        self.samples = [sample for sample in samples if self._usable(sample)]
        if not self.samples:
            raise InvalidRequest("the corpus has no answer that fits into max_length")
        for parameter in model.trainable().values():
            parameter.data = parameter.data.float()
        self.optimizer = torch.optim.AdamW(
            model.trainable().values(), lr=config.learning_rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True
        )
        self.step = 0
        self.slots_seen = 0
        self.seconds = 0.0

    def _usable(self, sample: Sample) -> bool:
        return len(sample.answer_ids) >= 3 and len(sample.prompt_ids) + 3 <= self.config.max_length

    def run(self, on_step: Callable[[StepStats], None], *, stop: Callable[[], bool] = lambda: False) -> None:
        """Train to the end, or until `stop`. Raises InvalidRequest that names the sample where a loss is not finite."""
        while self.step < self.config.steps and not stop():
            on_step(self._one_step())

    def _one_step(self) -> StepStats:
        started = time.perf_counter()
        rng = random.Random(f"{self.config.seed}/{self.step}")
        stage = self.config.stage(self.step)
        total, slots = 0.0, 0
        for index in self._draw():
            loss, count = self._loss(self.samples[index], stage, rng)
            if not math.isfinite(loss.item()):
                raise InvalidRequest(f"the loss is not finite in step {self.step}, sample {index} of the corpus; lower the learning rate")
            (loss / self.config.answers_per_step).backward()
            total, slots = total + loss.item() / self.config.answers_per_step, slots + count
        for group in self.optimizer.param_groups:
            group["lr"] = self.config.learning_rate_at(self.step)
        torch.nn.utils.clip_grad_norm_(self.model.trainable().values(), self.config.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)
        self.step += 1
        self.slots_seen += slots
        seconds = time.perf_counter() - started
        self.seconds += seconds
        return StepStats(self.step, total, slots, seconds)

    def _draw(self) -> list[int]:
        """Samples of this step: each epoch is a fresh shuffle."""
        per_step, size = self.config.answers_per_step, len(self.samples)
        chosen = []
        for number in range(self.step * per_step, (self.step + 1) * per_step):
            order = list(range(size))
            random.Random(f"{self.config.seed}/epoch/{number // size}").shuffle(order)
            chosen.append(order[number % size])
        return chosen

    def _loss(self, sample: Sample, stage: Stage, rng: random.Random) -> tuple[Tensor, int]:
        """Loss of one answer and how many slots it had."""
        model = self.model
        token_ids = torch.tensor(sample.token_ids[: self.config.max_length], device=model.transformer.device)
        first, last = len(sample.prompt_ids), len(token_ids) - 3
        places = range(first, last + 1)
        anchors = sorted(rng.sample(places, min(stage.anchors, len(places))))
        num_slots = model.config.num_slots(stage.block_size)
        batch = hang_blocks(torch.tensor(anchors, device=token_ids.device), num_slots, model.config.alignment)
        targets = batch.targets.flatten()
        inside = targets < len(token_ids)
        weights = position_weights(num_slots, stage.gamma).to(token_ids.device).expand(len(anchors), -1).flatten()[inside]
        head = model.transformer.head.weight
        if model.config.clean_rows_are_base:
            _, cache = clean_pass(model, token_ids)
            return head_loss(slot_pass(model, cache, batch)[inside], head, token_ids[targets[inside]], weights), int(inside.sum())
        clean, slots = joint_pass(model, token_ids, batch)
        loss = head_loss(slots[inside], head, token_ids[targets[inside]], weights)
        answer = slice(first - 1, len(token_ids) - 1)
        ar_loss = head_loss(clean[answer], head, token_ids[first:], torch.ones(len(token_ids) - first, device=token_ids.device))
        return loss + self.config.ar_weight * ar_loss, int(inside.sum())

    def save(self, path: Path) -> None:
        """Write everything that going on needs, whole or not at all."""
        state = {
            "model": {name: parameter.detach() for name, parameter in self.model.trainable().items()},
            "optimizer": self.optimizer.state_dict(),
            "progress": (self.step, self.slots_seen, self.seconds),
            "config": self.config.model_dump_json(),
        }
        partial = path.with_name(path.name + ".partial")
        torch.save(state, partial)
        partial.replace(path)

    def load(self, path: Path) -> None:
        """Go on from `save`. Raises InvalidRequest where the configuration is another."""
        state = torch.load(path, map_location=self.model.transformer.device, weights_only=True)
        if state["config"] != self.config.model_dump_json():
            raise InvalidRequest(f"{path} belongs to a run with another configuration; choose another output directory")
        with torch.no_grad():
            for name, parameter in self.model.trainable().items():
                parameter.copy_(state["model"][name])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.slots_seen, self.seconds = state["progress"]
