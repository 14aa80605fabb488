"""What a training run will take, before it starts: parameters, tokens, memory, time. Needs no
weights, only a `transformers` config."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from d3d.errors import InvalidCheckpoint
from d3d.hub.footprint import model_config
from d3d.hub.names import is_here
from d3d.hub.open_model import OpenModel, load_config
from d3d.model.drafter import DrafterModel
from d3d.model.from_target import from_target
from d3d.model.transformer import Transformer
from d3d.train.config import ModelSpec, RunConfig, Stage
from d3d.train.corpus import Sample
from d3d.train.trainer import StepStats, Trainer, usable
from d3d.train.work import AnswerShape, answer_flops, blank_drafter, blank_transformer, kept_bytes

ASSUMED_PROMPT = 0.25
"""Share of a text that is its prompt, where there is no corpus yet."""
STATED_FLOPS = {"cuda": 250e12, "cpu": 0.15e12}
"""Sustained operations a second of one process where nothing was measured: a quarter of an H100's
bfloat16 peak; two CPU cores."""
CALIBRATION = Stage(share=1.0, block_size=2, anchors=32)


@dataclass(frozen=True)
class Memory:
    """Bytes in each process."""

    frozen_weights: int
    trained_weights: int
    """Float32, and a copy in the compute dtype where full weights are computed in another."""
    gradients: int
    optimizer: int
    activations: int
    available: int

    @property
    def peak(self) -> int:
        return (
            self.frozen_weights
            + self.trained_weights
            + self.gradients
            + self.optimizer
            + self.activations
        )


@dataclass(frozen=True)
class Plan:
    """A run, resolved."""

    target: str
    base: str
    base_layers: int
    kept_layers: tuple[int, ...]
    trainable: int
    frozen: int
    processes: int
    distribution: str
    answers: int | None
    """In the corpus; None without one."""
    epochs: float | None
    clean_tokens: float
    """A step, all processes together."""
    slots: tuple[tuple[Stage, float], ...]
    """Slots a step, by stage."""
    total_clean: float
    total_slots: float
    memory: Memory
    flops_a_step: float
    """Mean over all steps."""
    flops_per_second: float
    """Of one process."""
    measured: bool
    steps: int

    @property
    def seconds_a_step(self) -> float:
        return self.flops_a_step / self.processes / self.flops_per_second


@dataclass(frozen=True)
class Machine:
    """Where the run will be."""

    device: torch.device
    dtype: torch.dtype
    processes: int = 1
    flops_per_second: float | None = None
    """Of one process; None takes STATED_FLOPS."""
    measured: bool = False

    def available(self) -> int:
        """Bytes of the device's memory that are free."""
        if self.device.type == "cuda":
            return int(torch.cuda.mem_get_info(self.device)[0])
        return int(psutil.virtual_memory().available) // self.processes


def plan_run(
    config: RunConfig, target: str, base: Any, samples: list[Sample] | None, machine: Machine
) -> Plan:
    """base: the `transformers` config of the model that the drafter is made of. Raises
    InvalidRequest and InvalidCheckpoint."""
    blank = blank_transformer(base, machine.dtype)
    model = blank_drafter(blank, config.drafter.resolve(blank.config.num_layers))
    texts = _texts(config, samples)
    train = config.train
    shapes = [(stage, _shape(model, texts, stage)) for stage in train.stages]
    mean = [(stage.share, shape) for stage, shape in shapes]
    twice = train.activation_checkpointing
    flops = train.answers_per_step * sum(
        share * answer_flops(model, shape, computed_twice=twice) for share, shape in mean
    )
    clean = train.answers_per_step * sum(share * shape.length for share, shape in mean)
    slots = train.answers_per_step * sum(share * shape.slots for share, shape in mean)
    full = config.drafter.delta is None
    distribution = "one process" if machine.processes == 1 else train.distributed
    if distribution == "auto":
        distribution = "fsdp" if full else "ddp"
    trainable = sum(parameter.numel() for parameter in model.trainable().values())
    return Plan(
        target=target,
        base=config.drafter.base.source if config.drafter.base else target,
        base_layers=blank.config.num_layers,
        kept_layers=model.config.kept_layers,
        trainable=trainable,
        frozen=0 if full else sum(parameter.numel() for parameter in blank.parameters()),
        processes=machine.processes,
        distribution=distribution,
        answers=None if samples is None else len(texts),
        epochs=None if samples is None else train.steps * train.answers_per_step / len(texts),
        clean_tokens=clean,
        slots=tuple((stage, train.answers_per_step * shape.slots) for stage, shape in shapes),
        total_clean=train.steps * clean,
        total_slots=train.steps * slots,
        memory=_memory(config, model, blank, texts, machine, distribution),
        flops_a_step=flops,
        flops_per_second=machine.flops_per_second or STATED_FLOPS[machine.device.type],
        measured=machine.measured,
        steps=train.steps,
    )


def _texts(config: RunConfig, samples: list[Sample] | None) -> list[tuple[int, int]]:
    """Tokens of prompt and whole text, as far as they are trained on."""
    longest = config.train.max_length
    if samples is None:
        return [(int(ASSUMED_PROMPT * longest), longest)]
    return [
        (len(sample.prompt_ids), min(len(sample.token_ids), longest))
        for sample in usable(samples, longest)[0]
    ]


def _shape(model: DrafterModel, texts: Sequence[tuple[int, int]], stage: Stage) -> AnswerShape:
    """Means over the texts."""
    count = len(texts)
    length = sum(total for _, total in texts) / count
    answer = sum(total - prompt for prompt, total in texts) / count
    anchors = sum(min(stage.anchors, total - prompt - 2) for prompt, total in texts) / count
    return AnswerShape(length, answer, anchors, model.config.num_slots(stage.block_size))


def _memory(
    config: RunConfig,
    model: DrafterModel,
    base: Transformer,
    texts: Sequence[tuple[int, int]],
    machine: Machine,
    distribution: str,
) -> Memory:
    trainable = sum(parameter.numel() for parameter in model.trainable().values())
    shared_by = machine.processes if distribution == "fsdp" else 1
    size = base.embedding.element_size()
    full = config.drafter.delta is None
    copies = 0
    if (
        full and size < 4
    ):  # shared out: embedding, head and two layers are whole at a time; else all of it
        layer = sum(parameter.numel() for parameter in model.transformer.layers[0].parameters())
        rest = trainable - layer * len(model.transformer.layers)
        copies = size * (rest + 2 * layer if distribution == "fsdp" else trainable)
    longest = max(total for _, total in texts)
    prompt = min(prompt for prompt, total in texts if total == longest)
    activations = max(
        kept_bytes(
            model,
            longest,
            min(stage.anchors, longest - prompt - 2),
            model.config.num_slots(stage.block_size),
            computed_twice=config.train.activation_checkpointing,
        )
        for stage in config.train.stages
    )
    return Memory(
        frozen_weights=0
        if full
        else size * sum(parameter.numel() for parameter in base.parameters()) // shared_by,
        trained_weights=4 * trainable // shared_by + copies,
        gradients=4 * trainable // shared_by,
        optimizer=8 * trainable // shared_by,
        activations=activations,
        available=machine.available(),
    )


def find_config(spec: ModelSpec, directory: Path) -> Any:
    """The `transformers` config of a model: its own where it is here, else the file named beside
    it, else the hub's.

    directory: what the file's path is relative to. Raises InvalidCheckpoint.
    """
    if spec.config is not None and not is_here(spec.source):
        file = (
            directory / spec.config
            if spec.config.name == "config.json"
            else directory / spec.config / "config.json"
        )
        if not file.is_file():
            raise InvalidCheckpoint(f"{file}, the config of {spec.source}, is not there")
        return load_config(file.parent)
    return model_config(spec.source)


def measure_flops(base: OpenModel, config: RunConfig) -> float:
    """Operations a second that this machine sustains in training, from the second of two small
    steps."""
    drafter = config.drafter.resolve(base.config.num_layers)
    model = from_target(base.transformer, drafter)
    length = min(128, config.train.max_length, base.config.max_length)
    draw = random.Random(0)
    ids = [draw.randrange(base.config.vocab_size) for _ in range(length)]
    block_size = min(stage.block_size for stage in config.train.stages)
    stage = CALIBRATION.model_copy(update={"block_size": block_size})
    small = config.train.model_copy(update={"steps": 2, "answers_per_step": 1, "stages": (stage,)})
    trainer = Trainer(model, [Sample(ids[:4], ids[4:], "calibration", 0.0, 0)], small)
    stats: list[StepStats] = []
    trainer.run(stats.append)
    shape = AnswerShape(
        length,
        length - 4,
        stats[-1].slots / model.config.num_slots(block_size),
        model.config.num_slots(block_size),
    )
    return (
        answer_flops(model, shape, computed_twice=config.train.activation_checkpointing)
        / stats[-1].seconds
    )
