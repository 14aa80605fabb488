"""The training pass and the replayed evaluation against the drafter as it drafts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from d3d.model.drafter import DrafterConfig, DrafterModel
from d3d.train.blocks import clean_pass, hang_blocks, joint_pass, slot_pass
from support.drafters import block_logits, every_kind, text, tiny_drafter
from support.tiny import tiny_transformer

Kind = dict[str, Any]
ANCHORS = [3, 3, 9, 4, 13]  # in any order, and two blocks may share one
LENGTH = 14


def slots_of(
    model: DrafterModel, token_ids: Tensor, anchors: list[int], *, joint: bool, num_slots: int = 4
) -> Tensor:
    """Hidden states [blocks, slots, hidden]."""
    batch = hang_blocks(token_ids, torch.tensor(anchors), num_slots, model.config)
    hidden = (
        joint_pass(model, token_ids, batch)[1]
        if joint
        else slot_pass(model, clean_pass(model, token_ids)[1], batch)
    )
    return hidden.view(len(anchors), num_slots, -1)


@every_kind
@pytest.mark.parametrize(
    ("scope", "joint"),
    [("slots", False), ("slots", True), ("all", True), (None, True), ("all", False)],
)
def test_a_block_in_training_computes_what_it_computes_when_it_drafts(
    kind: Kind, scope: str | None, joint: bool
) -> None:
    model = tiny_drafter(scope=scope, **kind)
    ids = text(LENGTH)
    hidden = slots_of(model, torch.tensor(ids), ANCHORS, joint=joint)
    draft_length = 4 + model.config.own_rows
    for block, anchor in enumerate(ANCHORS):
        alone = block_logits(model, ids[: anchor + 1], [-1] * draft_length)[-4:]
        torch.testing.assert_close(
            model.transformer.logits(hidden[block]), alone, atol=2e-4, rtol=1e-4
        )


@every_kind
@pytest.mark.parametrize("scope", ["slots", "all", None])
def test_clean_rows_of_the_joint_pass_are_those_of_a_pass_without_slots(
    kind: Kind, scope: str | None
) -> None:
    model = tiny_drafter(scope=scope, **kind)
    token_ids = torch.tensor(text(LENGTH))
    clean, _ = joint_pass(
        model, token_ids, hang_blocks(token_ids, torch.tensor(ANCHORS), 4, model.config)
    )
    torch.testing.assert_close(clean, clean_pass(model, token_ids)[0], atol=1e-5, rtol=1e-5)


@every_kind
def test_both_forms_of_the_pass_have_the_same_gradients(kind: Kind) -> None:
    model = tiny_drafter(**kind)
    token_ids = torch.tensor(text(LENGTH))
    direction = torch.randn(len(ANCHORS), 4, 64, generator=torch.Generator().manual_seed(0))
    gradients = []
    for joint in (False, True):
        model.zero_grad()
        (slots_of(model, token_ids, ANCHORS, joint=joint) * direction).sum().backward()
        gradients.append(
            {
                name: parameter.grad.clone()
                for name, parameter in model.trainable().items()
                if parameter.grad is not None
            }
        )
    assert gradients[0].keys() == gradients[1].keys() == model.trainable().keys()
    for name, gradient in gradients[0].items():
        assert gradient.abs().max() > 0
        assert (gradient - gradients[1][name]).abs().max() < 1e-4 * gradient.abs().max(), name


@every_kind
@pytest.mark.parametrize("joint", [False, True])
def test_a_block_depends_on_the_clean_tokens_up_to_its_anchor_and_on_no_other_block(
    kind: Kind, joint: bool
) -> None:
    model = tiny_drafter(**kind)
    ids = text(LENGTH)
    before = slots_of(model, torch.tensor(ids), [4, 9], joint=joint)
    for place in range(LENGTH):
        changed = ids[:place] + [(ids[place] + 1) % 90] + ids[place + 1 :]
        after = slots_of(model, torch.tensor(changed), [4, 9], joint=joint)
        for block, anchor in enumerate((4, 9)):
            moved = (after[block] - before[block]).abs().amax(-1)
            assert (moved > 1e-5).all() if place <= anchor else (moved < 1e-6).all()
    for others in ([], [4], [0, 12, 8, 4], [5]):
        again = slots_of(model, torch.tensor(ids), [*others, 9], joint=joint)[-1]
        torch.testing.assert_close(again, before[1], atol=1e-5, rtol=1e-5)


TEN = torch.arange(100, 110)


@pytest.mark.parametrize(
    ("alignment", "targets"),
    [("same", [[3, 4, 5], [8, 9, 10]]), ("next", [[4, 5, 6], [9, 10, 11]])],
)
def test_slots_stand_behind_their_anchor_and_predict_as_aligned(
    alignment: str, targets: list[list[int]]
) -> None:
    batch = hang_blocks(
        TEN, torch.tensor([2, 7]), 3, DrafterConfig(kept_layers=(0,), alignment=alignment)
    )  # type: ignore[arg-type]
    assert batch.rows.position.tolist() == [3, 4, 5, 8, 9, 10]
    assert batch.rows.anchor.tolist() == [2, 2, 2, 7, 7, 7]
    assert batch.rows.block.tolist() == [0, 0, 0, 1, 1, 1]
    assert batch.token_ids.tolist() == [-1] * 6
    assert batch.targets.tolist() == targets


def test_an_anchor_slot_stands_at_the_anchor_holds_its_token_and_sees_what_is_before() -> None:
    batch = hang_blocks(
        TEN, torch.tensor([2, 7]), 3, DrafterConfig(kept_layers=(0,), anchor_slot=True)
    )
    assert batch.rows.position.tolist() == [2, 3, 4, 7, 8, 9]
    assert batch.rows.anchor.tolist() == [1, 1, 1, 6, 6, 6]
    assert batch.token_ids.tolist() == [102, -1, -1, 107, -1, -1]
    assert batch.targets.tolist() == [[3, 4, 5], [8, 9, 10]]


@pytest.mark.parametrize("joint", [False, True])
def test_slots_past_the_models_context_are_no_crash_and_change_nothing_before(joint: bool) -> None:
    model = tiny_drafter(tiny_transformer(seed=1, max_position_embeddings=16))
    roomy = tiny_drafter(tiny_transformer(seed=1))
    token_ids = torch.tensor(text(LENGTH))
    got, expected = (slots_of(m, token_ids, [13], joint=joint)[0] for m in (model, roomy))
    torch.testing.assert_close(got[:2], expected[:2])  # positions 14 and 15
    assert torch.isfinite(got).all()
