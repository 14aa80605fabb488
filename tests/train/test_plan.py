"""A plan says before a run what the run takes: its counts are those of the real thing."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from d3d.errors import InvalidRequest
from d3d.model.config import decoder_config
from d3d.model.drafter import DeltaConfig, DrafterConfig
from d3d.model.from_target import from_target
from d3d.model.masks.rules import BlockAttention
from d3d.model.transformer import Transformer
from d3d.train.blocks import clean_pass, hang_blocks, joint_pass, slot_pass
from d3d.train.config import DrafterSpec, RunConfig, Stage, TrainConfig
from d3d.train.corpus import Sample
from d3d.train.plan import Machine, TrainingPlan
from d3d.train.trainer import Trainer
from d3d.train.work import (
    AnswerShape,
    answer_flops,
    blank_drafter,
    blank_transformer,
    kept_bytes,
    saved_bytes,
)
from support.tiny import tiny_config, tiny_tensors

CPU = torch.device("cpu")
DELTAS: dict[str, DeltaConfig | None] = {
    "slots": DeltaConfig(rank=8),
    "all": DeltaConfig(rank=8, scope="all"),
    "full": None,
}
every_kind = pytest.mark.parametrize("kind", DELTAS)


def shape_of(**changes: Any) -> Any:
    return tiny_config(
        "qwen3", num_hidden_layers=3, vocab_size=300, tie_word_embeddings=False, **changes
    )


def real(kind: str, **changes: Any) -> Any:
    shape = shape_of()
    base = Transformer(decoder_config(shape), tiny_tensors(shape)).eval()
    fields: dict[str, Any] = {
        "block_size": 6,
        "kept_layers": (0, 1, 2),
        "delta": DELTAS[kind],
        **changes,
    }
    return from_target(base, DrafterConfig(**fields))


def plan(
    kind: str = "slots",
    samples: list[Sample] | None = None,
    machine: Machine | None = None,
    **train: Any,
) -> TrainingPlan:
    stages = (Stage(share=0.5, block_size=3, anchors=6), Stage(share=0.5, block_size=6, anchors=4))
    settings = {"steps": 10, "answers_per_step": 2, "max_length": 64, "stages": stages, **train}
    config = RunConfig(
        drafter=DrafterSpec(block_size=8, delta=DELTAS[kind]), train=TrainConfig(**settings)
    )
    here = machine or Machine(CPU, torch.float32)
    return TrainingPlan(config, "target", shape_of(), samples, here)


@every_kind
def test_parameters_are_those_of_the_real_drafter(kind: str) -> None:
    found, model = plan(kind), real(kind, block_size=8)
    assert found.trainable == sum(parameter.numel() for parameter in model.trainable().values())
    everything = sum(parameter.numel() for parameter in model.parameters())
    assert found.frozen == everything - found.trainable


def test_slots_and_steps_are_those_that_the_trainer_counts() -> None:
    samples = [
        Sample([1] * 5, list(range(2, 40)), "x", 0.0, 0),
        Sample([1] * 9, list(range(2, 12)), "x", 0.0, 1),
    ]
    found = plan(samples=samples, max_length=30)
    assert (found.answers, found.epochs) == (2, 10.0)
    assert found.clean_tokens == 30 + 19
    stages = (Stage(share=0.5, block_size=3, anchors=6), Stage(share=0.5, block_size=6, anchors=4))
    trainer = Trainer(
        real("slots"),
        samples,
        TrainConfig(steps=10, answers_per_step=2, max_length=30, stages=stages),
    )
    slots: list[int] = []
    trainer.run(lambda stats: slots.append(stats.slots))
    assert sum(slots) <= found.total_slots == 5 * (2 * 6 * 2) + 5 * (2 * 4 * 5), (
        "slots behind the text's end are computed, too"
    )
    assert sum(slots) > 0.8 * found.total_slots


@every_kind
def test_a_corpus_that_can_not_be_trained_on_is_refused(kind: str) -> None:
    with pytest.raises(InvalidRequest, match="no sample that can be trained on"):
        plan(kind, samples=[Sample([1], [2], "x", 0.0, 0)])


@every_kind
@pytest.mark.parametrize("attention", ["causal", "bidirectional"])
def test_activations_are_what_a_real_pass_keeps(kind: str, attention: BlockAttention) -> None:
    """Attention itself may keep more or less: its kernel on a CPU is another."""
    length, anchors, num_slots = 60, 8, 5
    model = real(kind, block_attention=attention)
    token_ids = torch.arange(length) % 300
    batch = hang_blocks(token_ids, torch.arange(anchors) + 20, num_slots, model.config)
    cached = 0
    if kind == "slots":
        _, cache = clean_pass(model, token_ids)
        cached = sum(tensor.untyped_storage().nbytes() for tensor in cache.read(0, length))
        hidden, saved = saved_bytes(model, lambda: slot_pass(model, cache, batch))
    else:
        hidden, saved = saved_bytes(model, lambda: torch.cat(joint_pass(model, token_ids, batch)))
    assert hidden.requires_grad
    blank = blank_drafter(blank_transformer(shape_of(), torch.float32), model.config)
    planned = kept_bytes(blank, length, anchors, num_slots)
    rows = 40 if kind == "slots" else 100
    loss = rows * 300 * (2 * 4 + 2 * 4) if kind == "full" else 4 * 128 * 300 * 4 + 40 * 64 * 4
    assert planned - loss - cached == pytest.approx(saved, rel=0.3)


def test_computing_layers_twice_keeps_less_and_costs_more() -> None:
    once, twice = (
        plan("full", max_length=64),
        plan("full", max_length=64, activation_checkpointing=True),
    )
    assert twice.memory.activations < once.memory.activations
    assert 1.2 * once.flops_a_step < twice.flops_a_step < 1.4 * once.flops_a_step


def test_full_weights_cost_six_operations_a_weight_and_row() -> None:
    model = blank_drafter(blank_transformer(shape_of(), torch.float32), real("full").config)
    weights = sum(
        parameter.numel()
        for parameter in model.transformer.layers.parameters()
        if parameter.dim() == 2
    )
    one, two = (answer_flops(model, AnswerShape(length, 0, 0, 5)) for length in (1, 2))
    assert one == pytest.approx(6 * weights, rel=0.01)
    assert two == pytest.approx(12 * weights, rel=0.01)


def test_weights_that_are_shared_out_shrink_with_the_processes() -> None:
    alone, eight = (
        plan("full").memory,
        plan("full", machine=Machine(CPU, torch.float32, 8), answers_per_step=8).memory,
    )
    assert eight.optimizer == pytest.approx(alone.optimizer / 8, rel=0.001)
    assert eight.gradients == pytest.approx(alone.gradients / 8, rel=0.001)
    deltas = plan("slots", machine=Machine(CPU, torch.float32, 8), answers_per_step=8)
    assert deltas.distribution == "ddp"
    assert deltas.memory.optimizer == plan("slots").memory.optimizer


def test_time_is_operations_over_rate() -> None:
    found = plan(machine=Machine(CPU, torch.float32, 2, flops_per_second=1e6))
    assert found.seconds_a_step == found.flops_a_step / 2e6
