"""Drafters with a draft vocabulary: their drafts, their files, and the choice of the tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from d3d.errors import InvalidCheckpoint, InvalidRequest
from d3d.hub.checkpoint import DRAFT_IDS, save_drafter
from d3d.hub.open_drafter import load_drafter
from d3d.methods.async_.outcomes import Outcome
from d3d.methods.async_.packed_pass import PackedDrafter
from d3d.methods.serial.drafter import BlockDrafter
from d3d.model.drafter import DrafterModel
from d3d.model.linear import pack_weights
from d3d.target.native import NativeTarget
from d3d.train.config import DrafterSpec, RunConfig, Stage, TrainConfig
from d3d.train.corpus import Sample
from d3d.train.replay import predict_blocks
from d3d.train.run import TrainingRun, frequent_tokens
from support.drafters import block_logits, request, text, tiny_drafter
from support.runs import make, run_all
from support.tiny import tiny_transformer
from support.tiny_model import open_tiny, random_drafter, write_tiny_target

IDS = torch.arange(3, 90, 4)


def limited(**config: object) -> DrafterModel:
    model = tiny_drafter(draft_vocabulary=len(IDS), anchor_slot=True, **config)
    model.set_draft_ids(IDS)
    return model


def expected(model: DrafterModel, token_ids: list[int]) -> tuple[int, ...]:
    """The best of the tokens that can be drafted, place by place."""
    logits = block_logits(model, token_ids, [-1] * 6)
    return tuple(IDS[logits[:, IDS].argmax(-1)].tolist())


@pytest.mark.parametrize("prepared", [False, True])
def test_each_place_gets_the_best_of_those_tokens(prepared: bool) -> None:
    model, drafts = limited(), set()
    wanted = [expected(model, text(9, seed=seed)) for seed in range(5)]
    if prepared:
        with torch.no_grad():
            model.prepare_to_draft()
            pack_weights(model)
    for seed in range(5):
        (draft,) = BlockDrafter(model, 97).propose([request(text(9, seed=seed))])
        drafts.add(draft.token_ids)
    assert drafts == set(wanted)
    assert len(drafts) == 5


def test_successors_and_replay_keep_to_them_too() -> None:
    model = limited()
    blocks = (
        PackedDrafter(model, 97)
        .open(8)
        .prepare(text(8), [7, 50], [Outcome(2, 9), Outcome(0, 1)], 6)
    )
    assert blocks[Outcome(2, 9)].token_ids == expected(model, [*text(8), 7, 50, 9])
    token_ids = torch.tensor(text(20))
    predicted = predict_blocks(model, token_ids, 8, 6, recall=True)
    assert [tuple(row) for row in predicted.tokens.tolist()] == [
        expected(model, token_ids[: n + 1].tolist()) for n in range(8, 19)
    ]


def test_answers_are_the_targets_own_whatever_can_be_drafted() -> None:
    target = NativeTarget(tiny_transformer(seed=1))
    model = tiny_drafter(target.model, draft_vocabulary=len(IDS))
    model.set_draft_ids(IDS)
    runs, plain = (
        [make(target, text(3 + n, seed=n), max_tokens=20) for n in range(3)] for _ in range(2)
    )
    assert [
        one.ids
        for one in run_all(target, BlockDrafter(model, 97, shared_cache=target.cache), runs, 5)
    ] == [one.ids for one in run_all(target, None, plain, 0)]


def test_a_checkpoint_brings_them_along(tmp_path: Path) -> None:
    base = open_tiny(write_tiny_target(tmp_path / "target"))
    model = random_drafter(base, draft_vocabulary=len(IDS))
    model.set_draft_ids(IDS)
    save_drafter(tmp_path / "drafter", model, base)
    loaded = load_drafter(tmp_path / "drafter", base)
    assert loaded.draft_ids is not None
    assert torch.equal(loaded.draft_ids, IDS)
    file = tmp_path / "drafter" / "model.safetensors"
    for damage, message in (
        (lambda tensors: tensors.pop(DRAFT_IDS), f"lacks {DRAFT_IDS}"),
        (lambda tensors: tensors.update({DRAFT_IDS: tensors[DRAFT_IDS].flip(0)}), "ascending"),
        (
            lambda tensors: tensors.update({DRAFT_IDS: tensors[DRAFT_IDS] + 100_000}),
            "ascending token ids that the drafter knows",
        ),
        (
            lambda tensors: tensors.update({DRAFT_IDS: tensors[DRAFT_IDS][1:]}),
            f"must be {len(IDS)}",
        ),
    ):
        tensors = load_file(file)
        damage(tensors)
        save_file(tensors, tmp_path / "damaged.safetensors")
        whole = file.read_bytes()
        file.write_bytes((tmp_path / "damaged.safetensors").read_bytes())
        with pytest.raises(InvalidCheckpoint, match=message):
            load_drafter(tmp_path / "drafter", base)
        file.write_bytes(whole)


def test_they_are_the_most_frequent_ones_of_the_corpus(tmp_path: Path) -> None:
    samples = [Sample([40, 40, 41], [7, 7, 7, 90, 90, 8, 9], "test", 0.0, 0)]
    assert frequent_tokens(samples, 3, 100).tolist() in ([7, 8, 90], [7, 9, 90])
    assert frequent_tokens(samples, 5, 100).tolist() == [7, 8, 9, 40, 90]
    assert frequent_tokens(samples, 8, 100).tolist() == [0, 1, 7, 8, 9, 40, 41, 90]
    with pytest.raises(InvalidRequest, match="more than there are tokens, 100"):
        frequent_tokens(samples, 101, 100)
    base = open_tiny(write_tiny_target(tmp_path / "target"))
    training = TrainConfig(steps=1, stages=(Stage(share=1.0, block_size=4, anchors=2),), warmup=0)
    config = RunConfig(
        drafter=DrafterSpec(block_size=4, draft_vocabulary=5),
        train=training,
        evaluate_draft_length=4,
    )
    held_out = [Sample([1, 2], [3, 4, 5], "test", 0.0, 0)]
    run = TrainingRun(tmp_path / "run", base, config, samples, held_out)
    run.run(lambda _: None)
    kept = load_drafter(tmp_path / "run" / "best", base)
    assert kept.draft_ids is not None
    assert kept.draft_ids.tolist() == [7, 8, 9, 40, 90]
