"""Drafters whose slots skip layers: their drafts with their own cache, on the target's, packed, and
in training."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pydantic import ValidationError

from d3d.methods.async_.outcomes import Outcome
from d3d.methods.async_.packed_pass import PackedDrafter
from d3d.methods.serial.drafter import BlockDrafter
from d3d.model.drafter import DeltaConfig, DrafterConfig, DrafterModel
from d3d.model.linear import Linear, merge_deltas, pack_weights
from d3d.target.native import NativeTarget
from d3d.train.blocks import clean_pass, hang_blocks, joint_pass, slot_pass
from support.drafters import block_logits, grow, reference_draft, request, text, tiny_drafter
from support.runs import make, run_all
from support.tiny import tiny_transformer

KINDS = {
    f"{'anchor-slot' if anchor_slot else 'clean-anchor'}-{''.join(map(str, layers))}": {
        "anchor_slot": anchor_slot,
        "slot_layers": layers,
    }
    for anchor_slot in (False, True)
    for layers in ((0,), (1, 3), (0, 1, 2, 3))
}
every_thin = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)


def thin_drafter(**config: Any) -> DrafterModel:
    return tiny_drafter(tiny_transformer(seed=1, num_hidden_layers=4), **config)


@every_thin
def test_drafts_are_those_of_the_definition(kind: dict[str, Any]) -> None:
    model = thin_drafter(**kind)
    drafter = BlockDrafter(model, 97)
    batch = [request(text(9)), request(text(4, seed=3))]
    seen = set()
    for committed in (0, 1, 3, 7):
        for one in batch:
            grow(one, text(committed, seed=committed))
        drafted = [made.token_ids for made in drafter.propose(batch)]
        assert drafted == [tuple(reference_draft(model, one.token_ids, 6)) for one in batch]
        seen |= set(drafted)
    assert len(seen) > 4


@every_thin
def test_packed_successors_are_those_drafted_alone(kind: dict[str, Any]) -> None:
    model = thin_drafter(**kind)
    draft, outcomes = [7, 50, 3], [Outcome(3, 9), Outcome(0, 1), Outcome(2, 60)]
    blocks = PackedDrafter(model, 97).open(8).prepare(text(8), draft, outcomes, 5)
    for outcome, block in blocks.items():
        behind = [*text(8), *draft[: outcome.num_accepted], outcome.bonus_token]
        assert list(block.token_ids) == reference_draft(model, behind, 5)


@every_thin
@pytest.mark.parametrize("joint", [False, True])
def test_training_computes_what_drafting_computes_and_clean_rows_stay_the_base_models(
    kind: dict[str, Any], joint: bool
) -> None:
    model = thin_drafter(**kind)
    token_ids, anchors = torch.tensor(text(14)), [3, 9]
    batch = hang_blocks(token_ids, torch.tensor(anchors), 4, model.config)
    base, cache = clean_pass(model, token_ids)
    clean, slots = (
        joint_pass(model, token_ids, batch) if joint else (base, slot_pass(model, cache, batch))
    )
    torch.testing.assert_close(
        clean, clean_pass(thin_drafter(), token_ids)[0], atol=1e-5, rtol=1e-5
    )
    for block, anchor in enumerate(anchors):
        alone = block_logits(
            model, token_ids[: anchor + 1].tolist(), [-1] * (4 + model.config.own_rows)
        )[-4:]
        torch.testing.assert_close(
            model.transformer.logits(slots.view(2, 4, -1)[block]), alone, atol=2e-4, rtol=1e-4
        )


@every_thin
def test_layers_that_slots_pass_by_have_no_deltas_and_get_no_gradient(kind: dict[str, Any]) -> None:
    model = thin_drafter(**kind)
    assert {name.split(".")[2] for name in model.trainable() if ".layers." in name} == set(
        map(str, kind["slot_layers"])
    )
    token_ids = torch.tensor(text(14))
    cache = clean_pass(model, token_ids)[1]
    slot_pass(
        model, cache, hang_blocks(token_ids, torch.tensor([4]), 4, model.config)
    ).sum().backward()
    assert all(parameter.grad is not None for parameter in model.trainable().values())


@every_thin
@pytest.mark.parametrize("checkpointing", [False, True])
def test_beside_its_target_answers_are_the_targets_own(
    kind: dict[str, Any], checkpointing: bool
) -> None:
    target = NativeTarget(tiny_transformer(seed=1, num_hidden_layers=4))
    model = tiny_drafter(target.model, **kind)
    model.transformer.checkpointing = checkpointing
    runs, plain = (
        [make(target, text(3 + n, seed=n), max_tokens=20) for n in range(3)] for _ in range(2)
    )
    drafter = BlockDrafter(model, 97, shared_cache=target.cache_for(model))
    assert drafter.num_missing(runs[0].request) == 0, "it drafts on the target's cache"
    assert [one.ids for one in run_all(target, drafter, runs, 5)] == [
        one.ids for one in run_all(target, None, plain, 0)
    ]


@pytest.mark.parametrize("packed", [False, True])
def test_merged_deltas_draft_the_same_and_serve_passes_of_slots_only(packed: bool) -> None:
    plain, merged = (thin_drafter(anchor_slot=True, slot_layers=(1, 3)) for _ in range(2))
    with torch.no_grad():
        merge_deltas(merged)
        if packed:
            pack_weights(merged)
    for seed in range(4):
        one = request(text(9, seed=seed))
        drafts = [BlockDrafter(model, 97).propose([one]) for model in (plain, merged)]
        assert drafts[0] == drafts[1]
    with torch.no_grad():
        x = torch.randn(1, 5, 64, generator=torch.Generator().manual_seed(3))
        for one, other in zip(plain.modules(), merged.modules(), strict=True):
            if (
                isinstance(one, Linear)
                and isinstance(other, Linear)
                and one.up is not None
                and one.weight.shape[1] == 64
            ):
                torch.testing.assert_close(other(x, 5), one(x, 5), atol=1e-4, rtol=1e-4)
                torch.testing.assert_close(other(x, 2), one(x, 2), atol=1e-4, rtol=1e-4)
                other.up = other.down = None  # the sum alone serves a pass of slots
                torch.testing.assert_close(other(x, 5), one(x, 5), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"slot_layers": (1, 0)}, "ascending"),
        ({"slot_layers": (0, 4)}, "layer 4, which is not kept"),
        (
            {"slot_layers": (0,), "delta": DeltaConfig(rank=2, layers=(0, 1))},
            "layer 1, which slots do not go through",
        ),
        ({"slot_layers": (0,), "delta": DeltaConfig(rank=2, scope="all")}, "scope slots"),
        ({"slot_layers": (0,), "delta": None}, "scope slots"),
        ({"anchor_slot": True, "alignment": "same"}, "needs alignment next"),
    ],
)
def test_what_makes_no_sense_is_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        DrafterConfig(**{"kept_layers": (0, 1, 2), "delta": DeltaConfig(rank=2), **config})
