"""A drafter with a layer less computes what one made without it computes, and the one it came from
stays as it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from d3d.lab.prune.removal import depth_layers, removable, without_layer
from d3d.model.drafter import DeltaConfig, DrafterModel
from support.drafters import block_logits, text, tiny_drafter
from support.tiny import tiny_transformer

MASKS = [-1] * 5
KINDS: dict[str, dict[str, Any]] = {
    "deltas at slots": {"scope": "slots"},
    "anchor slot": {"scope": "slots", "anchor_slot": True},
    "deltas everywhere": {"scope": "all"},
    "full weights": {"scope": None},
}
every_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)


def four_layers(**kind: Any) -> DrafterModel:
    return tiny_drafter(tiny_transformer(seed=1, num_hidden_layers=4), **kind)


@every_kind
def test_the_layer_is_gone_from_the_draft_and_the_original_is_untouched(
    kind: dict[str, Any],
) -> None:
    model = four_layers(**kind)
    names, before = set(model.trainable()), block_logits(model, text(9), MASKS)
    thinner = without_layer(model, 2)
    assert depth_layers(thinner.config) == (0, 1, 3)
    assert set(model.trainable()) == names
    assert torch.equal(block_logits(model, text(9), MASKS), before)
    assert (block_logits(thinner, text(9), MASKS) - before).abs().max() > 1e-3
    assert all(
        thinner.trainable()[name] is model.trainable()[name]
        for name in set(thinner.trainable()) & names
        if ".layers." not in name
    )


def test_slots_pass_the_layer_by_and_clean_rows_go_through_it() -> None:
    model = four_layers(anchor_slot=True)
    thinner = without_layer(without_layer(model, 2), 0)
    assert thinner.config.slot_layers == (1, 3)
    assert thinner.config.kept_layers == (0, 1, 2, 3)
    assert thinner.config.clean_rows_are_base
    made = four_layers(anchor_slot=True, slot_layers=(1, 3))
    for name, parameter in made.trainable().items():
        parameter.data = model.trainable()[name].data
    torch.testing.assert_close(
        block_logits(thinner, text(9), MASKS), block_logits(made, text(9), MASKS)
    )
    assert set(thinner.trainable()) == set(made.trainable())


def test_a_layer_that_has_no_deltas_goes_like_any_other() -> None:
    model = tiny_drafter(
        tiny_transformer(seed=1, num_hidden_layers=4), delta=DeltaConfig(rank=4, layers=(3,))
    )
    assert removable(model.config) == (0, 1, 2)
    assert without_layer(model, 1).config.delta_layers == (3,)


def test_the_last_layer_stays() -> None:
    assert removable(four_layers(slot_layers=(2,)).config) == ()
    assert removable(four_layers(scope=None, kept_layers=(0, 1, 2, 3)).config) == (0, 1, 2, 3)
