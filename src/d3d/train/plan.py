"""Plan of a training run for `--dry-run`: parameters, tokens, memory and time. It needs a
`transformers` config, but no weights."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch
from torch import Tensor

from d3d.errors import InvalidCheckpoint
from d3d.hub.footprint import model_config
from d3d.hub.names import is_here
from d3d.hub.open_model import OpenModel, load_config
from d3d.model.drafter import DrafterModel
from d3d.model.from_target import from_target
from d3d.model.transformer import Transformer
from d3d.train.config import ModelSpec, RunConfig, Stage
from d3d.train.corpus import Sample
from d3d.train.trainer import StepStats, Trainer, shortest_answer, usable
from d3d.train.work import AnswerShape, answer_flops, blank_drafter, blank_transformer, kept_bytes

ASSUMED_PROMPT = 0.25
"""The prompt's share of a text if there is no corpus yet."""
STATED_FLOPS = {"cuda": 250e12, "cpu": 0.15e12}
"""Sustained operations per second of one process if not measured: a quarter of an H100's bfloat16
peak; two CPU cores."""
CALIBRATION = Stage(share=1.0, block_size=2, anchors=32)

Texts = Sequence[tuple[int, int]]
"""Tokens of the prompt and of the whole text, as far as they are trained on."""


@dataclass(frozen=True)
class Machine:
    """Processes of a run and their device."""

    device: torch.device
    dtype: torch.dtype
    processes: int = 1
    flops_per_second: float | None = None
    """Rate of one process; None: STATED_FLOPS."""
    measured: bool = False

    @property
    def rate(self) -> float:
        """Operations per second of one process."""
        return self.flops_per_second or STATED_FLOPS[self.device.type]

    def available(self) -> int:
        """Free bytes of memory for each process."""
        if self.device.type == "cuda":
            return int(torch.cuda.mem_get_info(self.device)[0])
        return int(psutil.virtual_memory().available) // self.processes


class TrainingMemory(NamedTuple):
    """Bytes in each process."""

    frozen_weights: int
    trained_weights: int
    """Float32, and a copy in the compute dtype if full weights are computed in another."""
    gradients: int
    optimizer: int
    activations: int

    @property
    def peak(self) -> int:
        return sum(self)


class TrainingPlan:
    """Needs of a run. Tokens, slots and operations are those of all processes together."""

    def __init__(
        self,
        config: RunConfig,
        target: str,
        base: Any,
        samples: list[Sample] | None,
        machine: Machine,
    ) -> None:
        """base: `transformers` config of the model whose layers the drafter starts from; samples:
        None if there is no corpus yet. Raises InvalidRequest and InvalidCheckpoint."""
        train, full = config.train, config.drafter.delta is None
        self.target, self.machine, self.steps = target, machine, train.steps
        blank = blank_transformer(base, machine.dtype)
        model = blank_drafter(blank, config.drafter.resolve(blank.config.num_layers))
        texts = _texts(samples, train.max_length, shortest_answer(model.config))
        self.base = config.drafter.base.source if config.drafter.base else target
        self.base_layers, self.kept_layers = blank.config.num_layers, model.config.kept_layers
        self.trainable = _count(model.trainable().values())
        self.frozen = 0 if full else _count(blank.parameters())
        self.distribution = train.distributed if machine.processes > 1 else "one process"
        if self.distribution == "auto":
            self.distribution = "fsdp" if full else "ddp"
        per_step = train.answers_per_step
        self.answers = None if samples is None else len(texts)
        self.epochs = None if samples is None else train.steps * per_step / len(texts)
        shapes = [(stage, _mean_shape(model, texts, stage)) for stage in train.stages]
        twice = train.activation_checkpointing
        self.clean_tokens = sum(per_step * stage.share * shape.length for stage, shape in shapes)
        """Per step, mean over all steps."""
        self.slots = [(stage, per_step * shape.slots) for stage, shape in shapes]
        """Per step, by stage."""
        self.flops_a_step = sum(
            per_step * stage.share * answer_flops(model, shape, computed_twice=twice)
            for stage, shape in shapes
        )
        """Floating-point operations, mean over all steps."""
        self.memory = self._memory(config, model, blank, texts)

    @property
    def total_slots(self) -> float:
        return self.steps * sum(stage.share * slots for stage, slots in self.slots)

    @property
    def seconds_a_step(self) -> float:
        return self.flops_a_step / self.machine.processes / self.machine.rate

    def _memory(
        self, config: RunConfig, model: DrafterModel, base: Transformer, texts: Texts
    ) -> TrainingMemory:
        sharded = self.distribution == "fsdp"
        parts = self.machine.processes if sharded else 1
        size = base.embedding.element_size()
        copies = 0
        if config.drafter.delta is None and size < 4:
            # sharded: embedding, head and two layers are whole at a time; else all of it
            layer = _count(model.transformer.layers[0].parameters())
            rest = self.trainable - layer * len(model.transformer.layers)
            copies = size * (rest + 2 * layer if sharded else self.trainable)
        longest = max(length for _, length in texts)
        prompt = min(prompt for prompt, length in texts if length == longest)
        activations = max(
            kept_bytes(
                model,
                longest,
                min(stage.anchors, _places(model, prompt, longest)),
                model.config.num_slots(stage.block_size),
                computed_twice=config.train.activation_checkpointing,
            )
            for stage in config.train.stages
        )
        return TrainingMemory(
            frozen_weights=size * self.frozen // parts,
            trained_weights=4 * self.trainable // parts + copies,
            gradients=4 * self.trainable // parts,
            optimizer=8 * self.trainable // parts,
            activations=activations,
        )


def _count(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() for tensor in tensors)


def _texts(samples: list[Sample] | None, max_length: int, shortest: int) -> Texts:
    if samples is None:
        return [(int(ASSUMED_PROMPT * max_length), max_length)]
    return [
        (len(sample.prompt_ids), min(len(sample.token_ids), max_length))
        for sample in usable(samples, max_length, shortest)[0]
    ]


def _places(model: DrafterModel, prompt: int, length: int) -> int:
    """Positions of a text at which a block may hang."""
    return length - prompt - shortest_answer(model.config) + 1


def _mean_shape(model: DrafterModel, texts: Texts, stage: Stage) -> AnswerShape:
    count = len(texts)
    return AnswerShape(
        sum(length for _, length in texts) / count,
        sum(length - prompt for prompt, length in texts) / count,
        sum(min(stage.anchors, _places(model, prompt, length)) for prompt, length in texts) / count,
        model.config.num_slots(stage.block_size),
    )


def find_config(spec: ModelSpec, directory: Path) -> Any:
    """`transformers` config of a model: its own if it is on this machine, else the file that the
    spec names, else the hub's.

    directory: base of the spec's path. Raises InvalidCheckpoint."""
    if spec.config is None or is_here(spec.source):
        return model_config(spec.source)
    path = directory / spec.config
    file = path if path.name == "config.json" else path / "config.json"
    if not file.is_file():
        raise InvalidCheckpoint(f"{file}, the config of {spec.source}, is not there")
    return load_config(file.parent)


def measure_flops(base: OpenModel, config: RunConfig) -> float:
    """Operations per second that this machine sustains in training, from the second of two small
    steps."""
    model = from_target(base.transformer, config.drafter.resolve(base.config.num_layers))
    length = min(128, config.train.max_length, base.config.max_length)
    draw = random.Random(0)
    ids = [draw.randrange(base.config.num_tokens) for _ in range(length)]
    block_size = min(stage.block_size for stage in config.train.stages)
    stage = CALIBRATION.model_copy(update={"block_size": block_size})
    small = config.train.model_copy(update={"steps": 2, "answers_per_step": 1, "stages": (stage,)})
    trainer = Trainer(model, [Sample(ids[:4], ids[4:], "calibration", 0.0, 0)], small)
    stats: list[StepStats] = []
    trainer.run(stats.append)
    num_slots = model.config.num_slots(block_size)
    shape = AnswerShape(length, length - 4, stats[-1].slots / num_slots, num_slots)
    twice = config.train.activation_checkpointing
    return answer_flops(model, shape, computed_twice=twice) / stats[-1].seconds
