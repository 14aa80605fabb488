"""The trainer: one answer per pass, many blocks per answer, a few answers per optimizer step.

It works on a drafter, samples and a schedule. One state holds everything needed to continue."""

from __future__ import annotations

import math
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from pydantic import BaseModel, ValidationError
from torch import Tensor

from d3d.errors import InvalidRequest, NotFinite
from d3d.model.drafter import DrafterConfig, DrafterModel
from d3d.model.finite import bad_weight
from d3d.train.config import Stage, TrainConfig
from d3d.train.corpus import Sample
from d3d.train.objective import AnswerLoss, AnswerObjective
from d3d.train.parallel import Parallel
from d3d.train.state import RunProgress, Trained


class StepStats(NamedTuple):
    """One optimizer step, of all processes together."""

    step: int
    loss: float
    slots: int
    seconds: float


class TrainingNotFinite(NotFinite):
    """A loss or a gradient that is NaN or infinite."""

    def __init__(self, what: str, where: str, samples: list[Sample], cause: str) -> None:
        """samples: those of the pass, or passes, concerned."""
        super().__init__(what, where, cause=cause)
        self.samples = samples


class Trainer:
    """Trains `model` on `samples`; a run may be interrupted and continues from the last `save`."""

    def __init__(
        self,
        model: DrafterModel,
        samples: list[Sample],
        config: TrainConfig,
        parallel: Parallel | None = None,
        identity: Mapping[str, str] | None = None,
    ) -> None:
        """parallel: the processes that share the work, by default this one alone; identity: what a
        continued run must have in common with its state, beside the configurations. Computes in the
        model's dtype; trained weights become float32.

        Raises InvalidRequest if no sample can be used, or if the drafter or the processes can't do
        what the configuration asks for."""
        self.model, self.config = model, config
        self.parallel = parallel or Parallel()
        self.samples, self.left_out = usable(
            samples, config.max_length, shortest_answer(model.config)
        )
        self._check()
        self._extra_identity = dict(identity or {})
        compute_dtype = model.transformer.dtype
        for parameter in model.trainable().values():
            parameter.data = parameter.data.float()
        model.transformer.checkpointing = config.activation_checkpointing
        self.objective = AnswerObjective(
            model, config, None if self.parallel.shards_weights else compute_dtype
        )
        self.parallel.prepare(self.objective, compute_dtype)
        self.optimizer = torch.optim.AdamW(
            model.trainable().values(),
            lr=config.learning_rate,
            betas=(0.9, 0.95),
            weight_decay=0.0,
            fused=True,
        )
        self.step = 0
        self.slots_seen = 0
        self.seconds = 0.0

    def _check(self) -> None:
        config, drafter = self.config, self.model.config
        largest = max(stage.block_size for stage in config.stages)
        if largest > drafter.block_size:
            raise InvalidRequest(
                f"train.stages: a block_size of {largest} is above the drafter's own, "
                f"{drafter.block_size}"
            )
        teacher = config.teacher if config.distillation > 0 else None
        if teacher == "clean_rows" and not drafter.clean_rows_are_base:
            raise InvalidRequest(
                "train.distillation needs clean rows that are the target's own: deltas with scope "
                "slots; or teacher: recorded, with a corpus made by `d3d data --top-logits`"
            )
        if teacher == "recorded" and any(sample.top is None for sample in self.samples):
            raise InvalidRequest(
                "train.teacher is recorded, but the corpus holds no logits of its target; write it "
                "with --top-logits"
            )
        if config.answers_per_step % self.parallel.size:
            raise InvalidRequest(
                f"train.answers_per_step ({config.answers_per_step}) can't be shared evenly by "
                f"{self.parallel.size} processes"
            )

    def run(
        self, on_step: Callable[[StepStats], None], *, stop: Callable[[], bool] = lambda: False
    ) -> None:
        """Train to the end, or until `stop`. Raises TrainingNotFinite if a loss or a gradient is
        not finite; the weights are then those of the step before."""
        while self.step < self.config.steps and not self.parallel.any(stop()):
            on_step(self._one_step())

    def _one_step(self) -> StepStats:
        started = time.perf_counter()
        stage = self.config.stage(self.step)
        total, slots = 0.0, 0
        self.optimizer.zero_grad(set_to_none=False)
        mine = self.parallel.share(self._draw(stage))
        for index, anchors in mine:
            loss, count = self._loss(self.samples[index], stage, anchors)
            self._check_finite("loss", loss, [index])
            (loss / len(mine)).backward()
            total, slots = total + loss.item() / len(mine), slots + count
        parameters = list(self.model.trainable().values())
        self.parallel.average_gradients(parameters)
        norm = self.parallel.whole(torch.nn.utils.clip_grad_norm_(parameters, self.config.clip))
        self._check_finite("gradient", norm, [index for index, _ in mine])
        for group in self.optimizer.param_groups:
            group["lr"] = self.config.learning_rate_at(self.step)
        self.optimizer.step()
        total, all_slots = self.parallel.sums(total / self.parallel.size, slots)
        self.step += 1
        self.slots_seen += round(all_slots)
        seconds = time.perf_counter() - started
        self.seconds += seconds
        return StepStats(self.step, total, round(all_slots), seconds)

    def _check_finite(self, what: str, value: Tensor, indices: list[int]) -> None:
        """Raise in all processes if one has a problem, so that none waits for another."""
        finite = math.isfinite(value.item())
        if not self.parallel.any(not finite):
            return
        odd = [index for part in self.parallel.gather([] if finite else indices) for index in part]
        samples = [self.samples[index] for index in sorted(set(odd))]
        names = ", ".join(dict.fromkeys(sample.source for sample in samples))
        where = f"training step {self.step}, in an answer of {names}"
        raise TrainingNotFinite(f"the {what} is", where, samples, self._advice())

    def _advice(self) -> str:
        """Why a loss or a gradient is not finite, and what to do."""
        name = None if self.parallel.shards_weights else bad_weight(self.model)
        if name in self.model.trainable():
            return f"the weights that are trained hold such numbers ({name}); lower learning_rate"
        if name is not None:
            return f"the base's weights hold such numbers ({name}); fetch the model again"
        dtype = self.model.transformer.dtype
        if dtype is torch.float32:
            return "the weights are finite; lower learning_rate, or leave these answers out"
        return (
            f"the weights are finite; train with --dtype float32 if this is too much for "
            f"{str(dtype).removeprefix('torch.')}, or lower learning_rate"
        )

    def _draw(self, stage: Stage) -> list[tuple[int, list[int]]]:
        """Samples of this step and their anchors, equal in all processes; each epoch is shuffled
        anew."""
        per_step, size = self.config.answers_per_step, len(self.samples)
        rng = random.Random(f"{self.config.seed}/{self.step}")
        drawn = []
        for number in range(self.step * per_step, (self.step + 1) * per_step):
            order = list(range(size))
            random.Random(f"{self.config.seed}/epoch/{number // size}").shuffle(order)
            index = order[number % size]
            sample, shortest = self.samples[index], shortest_answer(self.model.config)
            anchors = draw_anchors(sample, stage, self.config.max_length, rng, shortest)
            drawn.append((index, anchors))
        return drawn

    def _loss(self, sample: Sample, stage: Stage, anchors: list[int]) -> AnswerLoss:
        token_ids = torch.tensor(
            sample.token_ids[: self.config.max_length], device=self.model.transformer.device
        )
        recorded = self.config.distillation > 0 and self.config.teacher == "recorded"
        top = sample.top_logits() if recorded else None
        loss: AnswerLoss = self.objective(token_ids, len(sample.prompt_ids), anchors, stage, top)
        return loss

    def save(self, path: Path) -> None:
        """Write the state atomically."""
        progress = RunProgress(self.step, self.slots_seen, self.seconds, self._identity())
        self.parallel.save(path, Trained(self.model.trainable(), self.optimizer), progress)

    def load(self, path: Path) -> None:
        """Continue from `save`. Raises InvalidRequest if the state is damaged, or if its drafter or
        configuration is another."""
        saved = self.parallel.read_progress(path)
        for name, value in self._identity().items():
            if not _same(name, saved.identity.get(name), value):
                raise InvalidRequest(
                    f"{path} belongs to a run with another {name}; choose another output directory"
                )
        self.parallel.load(path, Trained(self.model.trainable(), self.optimizer))
        self.step, self.slots_seen, self.seconds = saved.step, saved.slots_seen, saved.seconds

    def _identity(self) -> dict[str, str]:
        """Identity that a run must have in common with the state that it continues."""
        return {
            "training configuration": self.config.model_dump_json(),
            "drafter configuration": self.model.config.model_dump_json(),
            **self._extra_identity,
        }


def _same(name: str, saved: str | None, wanted: str) -> bool:
    """True if two identities agree; keys that an older configuration lacks have their defaults."""
    kinds: dict[str, type[BaseModel]] = {
        "training configuration": TrainConfig,
        "drafter configuration": DrafterConfig,
    }
    if name not in kinds:
        return saved in (None, wanted)
    read = kinds[name].model_validate_json
    try:
        return saved is not None and read(saved) == read(wanted)
    except ValidationError:
        return False


def shortest_answer(config: DrafterConfig) -> int:
    """Tokens of the shortest answer that can be trained on: an anchor, perhaps a token that its own
    row predicts, and one that a slot predicts."""
    return 2 + config.own_rows


def draw_anchors(
    sample: Sample, stage: Stage, max_length: int, rng: random.Random, shortest: int
) -> list[int]:
    """Random positions of a stage's anchors in a sample's answer, ascending; at most all of them.
    shortest: see `shortest_answer`."""
    places = range(len(sample.prompt_ids), min(len(sample.token_ids), max_length) - shortest + 1)
    return sorted(rng.sample(places, min(stage.anchors, len(places))))


def usable(
    samples: list[Sample], max_length: int, shortest: int
) -> tuple[list[Sample], dict[str, int]]:
    """The samples that can be trained on, and the number of the others by reason. shortest: see
    `shortest_answer`. Raises InvalidRequest if none can."""
    good, left_out = [], Counter[str]()
    for sample in samples:
        if not sample.prompt_ids:
            left_out["the prompt is empty"] += 1
        elif len(sample.answer_ids) < shortest:
            left_out[f"the answer has fewer than {shortest} tokens"] += 1
        elif len(sample.prompt_ids) + shortest > max_length:
            no_room = f"the prompt leaves no room for an answer in a max_length of {max_length}"
            left_out[no_room] += 1
        else:
            good.append(sample)
    if not good:
        reasons = "; ".join(f"{count} because {reason}" for reason, count in left_out.items())
        raise InvalidRequest(
            f"the corpus has no sample that can be trained on: {reasons or 'it is empty'}"
        )
    return good, dict(left_out)
