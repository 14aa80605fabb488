"""What a drafter is made of: the base's layers, deltas that act where they should, and a way to say
`masked`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from d3d.errors import InvalidCheckpoint
from d3d.model.drafter import DrafterConfig, DrafterModel
from d3d.model.from_target import from_target, linear_layers
from d3d.model.kv_cache import PassThrough
from d3d.model.masks.dense import dense
from d3d.model.masks.rules import Rows, block_rules, union
from d3d.model.transformer import Transformer
from support.drafters import block_logits, every_kind, text, tiny_drafter
from support.tiny import tiny_transformer

CLEAN, SLOTS = 9, 4


@torch.no_grad()
def one_pass(model: DrafterModel, delta_rows: int) -> Tensor:
    """Hidden states of a clean text and the slots of a block behind it."""
    slots = torch.arange(CLEAN, CLEAN + SLOTS)
    blocks = Rows(
        slots, torch.full_like(slots, CLEAN - 1), torch.zeros_like(slots), torch.zeros_like(slots)
    )
    rows = Rows.concatenate(Rows.clean(torch.arange(CLEAN)), blocks)
    mask = dense(union(block_rules(model.config.block_attention)), rows, rows)[None]
    x = model.embed(torch.tensor([text(CLEAN) + [-1] * SLOTS]))
    return model.transformer.hidden(x, rows.position[None], mask, PassThrough(), delta_rows)[0]


@every_kind
def test_deltas_at_slots_leave_clean_rows_as_they_are_to_the_bit(kind: dict[str, Any]) -> None:
    trained, untrained = tiny_drafter(**kind), tiny_drafter(trained=False, **kind)
    with_deltas = one_pass(trained, trained.delta_rows(CLEAN + SLOTS, SLOTS))
    without = one_pass(untrained, 0)
    assert torch.equal(with_deltas[:CLEAN], without[:CLEAN])
    assert (with_deltas[CLEAN:] - without[CLEAN:]).abs().amax(-1).min() > 0.01  # each slot differs


def test_deltas_of_scope_all_act_on_every_row() -> None:
    trained, untrained = tiny_drafter(scope="all"), tiny_drafter(scope="all", trained=False)
    difference = one_pass(trained, trained.delta_rows(CLEAN + SLOTS, SLOTS)) - one_pass(
        untrained, 0
    )
    assert difference.abs().amax(-1).min() > 0.01


def test_full_weights_have_no_deltas() -> None:
    model = tiny_drafter(scope=None)
    assert model.delta_rows(CLEAN + SLOTS, SLOTS) == 0
    assert all(layer.down is None for layer in linear_layers(model).values())


@pytest.mark.parametrize("scope", ["slots", "all", None])
@torch.no_grad()
def test_untrained_the_anchors_row_predicts_the_base_models_next_token(scope: str | None) -> None:
    base = tiny_transformer(seed=1)
    model = tiny_drafter(base, scope=scope, trained=False)
    ids = text(12)
    mask = torch.ones(12, 12).tril().bool()[None]
    hidden = base.hidden(
        base.embed(torch.tensor([ids])), torch.arange(12)[None], mask, PassThrough()
    )
    torch.testing.assert_close(
        block_logits(model, ids, [-1] * 3)[0], base.logits(hidden[0, -1]), atol=1e-5, rtol=1e-5
    )


def test_every_linear_layer_but_the_head_carries_deltas() -> None:
    model = tiny_drafter()
    assert set(linear_layers(model)) == {
        f"{i}.{name}" for i in range(2) for name in ("qkv", "out", "gate_up", "down")
    }
    deltas = {
        f"transformer.layers.{name}.{part}"
        for name in linear_layers(model)
        for part in ("down", "up")
    }
    assert set(model.trainable()) == deltas | {"mask_vector"}


def test_with_full_weights_everything_is_trained_and_the_base_is_not_touched() -> None:
    base = tiny_transformer(seed=1)
    before = {name: parameter.clone() for name, parameter in base.named_parameters()}
    model = tiny_drafter(base, scope=None)
    assert set(model.trainable()) == {f"transformer.{name}" for name in before} | {"mask_vector"}
    for parameter in model.parameters():
        parameter.data += 1
    assert all(torch.equal(parameter, before[name]) for name, parameter in base.named_parameters())
    assert not any(parameter.requires_grad for parameter in base.parameters())
    assert (
        model.transformer.head.weight is model.transformer.embedding
    )  # tied, and stays so in training


def test_deltas_share_the_base_models_memory_and_leave_it_without_deltas() -> None:
    base = tiny_transformer(seed=1)
    model = tiny_drafter(base)
    shared = {parameter.data_ptr() for parameter in base.parameters()}
    assert {p.data_ptr() for p in model.parameters() if not p.requires_grad} <= shared
    assert all(
        module.down is None
        for module in base.modules()
        if hasattr(module, "down") and hasattr(module, "weight")
    )


@pytest.mark.parametrize("kept", [(0,), (1, 3), (0, 1, 2, 3)])
@torch.no_grad()
def test_any_subset_of_layers_is_taken_in_order(kept: tuple[int, ...]) -> None:
    base = tiny_transformer(num_hidden_layers=4)
    model = from_target(base, DrafterConfig(kept_layers=kept))
    x, positions = base.embed(torch.tensor([text(5)])), torch.arange(5)[None]
    thin = Transformer.hidden(model.transformer, x, positions, None, PassThrough())
    for index, layer in enumerate(base.layers):
        if index not in kept:
            for name in ("out", "down"):
                getattr(
                    layer, name
                ).weight.data.zero_()  # a layer that adds nothing is a layer that is not there
    torch.testing.assert_close(
        thin, base.hidden(x, positions, None, PassThrough()), atol=1e-5, rtol=1e-5
    )


def test_layers_that_the_base_does_not_have_are_refused() -> None:
    with pytest.raises(InvalidCheckpoint, match="keeps layer 2, its base has layers 0 to 1"):
        from_target(tiny_transformer(), DrafterConfig(kept_layers=(0, 2)))


@pytest.mark.parametrize("kept", [(), (1, 0), (0, 0), (-1, 0)])
def test_layers_must_be_ascending(kept: tuple[int, ...]) -> None:
    with pytest.raises(ValidationError, match="kept_layers must be ascending"):
        DrafterConfig(kept_layers=kept)


@pytest.mark.parametrize(
    "field", [{"block_size": 0}, {"alignment": "previous"}, {"mask_token_id": -1}, {"blocksize": 4}]
)
def test_a_config_that_means_nothing_is_refused(field: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        DrafterConfig(kept_layers=(0,), **field)


def test_a_mask_token_without_embedding_is_refused() -> None:
    with pytest.raises(
        InvalidCheckpoint, match="mask_token_id is 97, the drafter knows ids below 97"
    ):
        tiny_drafter(mask_token_id=97)


def test_masked_places_get_the_learned_vector_and_others_their_embedding() -> None:
    model = tiny_drafter()
    embedded = model.embed(torch.tensor([[5, -1, 0, -1]]))[0]
    assert model.mask_vector is not None
    assert torch.equal(embedded[1], model.mask_vector)
    assert torch.equal(embedded[3], model.mask_vector)
    assert torch.equal(embedded[[0, 2]], model.transformer.embedding[[5, 0]])


def test_the_same_seed_makes_the_same_drafter() -> None:
    base = tiny_transformer()
    config = DrafterConfig(kept_layers=(0, 1), delta={"rank": 2})
    one, same, other = (from_target(base, config, seed=seed) for seed in (1, 1, 2))
    assert all(
        torch.equal(tensor, same.trainable()[name]) for name, tensor in one.trainable().items()
    )
    assert not torch.equal(one.mask_vector, other.mask_vector)
