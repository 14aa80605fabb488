"""Weights in the blocks that the CPU's kernels read: the same numbers, shared as before."""

from __future__ import annotations

import pytest
import torch

from d3d.model.from_target import clean_rows_are_of
from d3d.model.linear import Linear, linear, pack_weights
from support.drafters import tiny_drafter
from support.tiny import tiny_transformer


def has_blocks(dtype: torch.dtype) -> bool:
    """oneDNN packs bfloat16 only for processors that it has bfloat16 kernels for."""
    return dtype is torch.float32 or torch.ops.mkldnn._is_mkldnn_bf16_supported()


ROWS = [(1, 1), (1, 3), (1, 17), (3, 1), (4, 40)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", ROWS, ids=str)
def test_a_packed_layer_computes_the_same(
    dtype: torch.dtype, bias: bool, shape: tuple[int, int]
) -> None:
    generator = torch.Generator().manual_seed(1)
    layer = Linear(
        torch.randn(24, 16, generator=generator).to(dtype),
        torch.randn(24, generator=generator).to(dtype) if bias else None,
    )
    layer.add_delta(
        torch.randn(4, 16, generator=generator).to(dtype),
        torch.randn(24, 4, generator=generator).to(dtype),
    )
    x = torch.randn(*shape, 16, generator=generator).to(dtype)
    delta_rows = shape[1] // 2
    with torch.inference_mode():
        expected = layer(x, delta_rows)
        pack_weights(layer)
        assert layer.weight.is_mkldnn is has_blocks(dtype)
        assert layer.weight.shape == (24, 16)
        rounding = 1e-5 if dtype is torch.float32 else 2.0**-6
        torch.testing.assert_close(
            layer(x, delta_rows), expected, atol=20 * rounding, rtol=rounding
        )


def test_rows_that_are_no_neighbours_in_memory() -> None:
    layer = Linear(torch.randn(8, 6, generator=torch.Generator().manual_seed(0)))
    x = torch.randn(3, 5, 12, generator=torch.Generator().manual_seed(1))[:, 1:, ::2]
    expected = layer(x)
    pack_weights(layer)
    with torch.inference_mode():
        torch.testing.assert_close(layer(x), expected)


def test_layers_that_share_weights_go_on_sharing_them() -> None:
    base = tiny_transformer(seed=1)
    model = tiny_drafter(base)
    pack_weights(base, model)
    assert clean_rows_are_of(model, base)
    for own, theirs in zip(model.transformer.layers, base.layers, strict=True):
        assert own.qkv.weight is theirs.qkv.weight  # type: ignore[union-attr]
    assert model.transformer.head.weight is base.head.weight


def test_a_tied_embedding_can_still_be_looked_up() -> None:
    base = tiny_transformer(seed=1)
    ids = torch.tensor([[3, 5]])
    before = base.embed(ids)
    pack_weights(base)
    assert base.head.weight.is_mkldnn
    assert not base.embedding.is_mkldnn
    assert torch.equal(base.embed(ids), before)


def test_packed_weights_refuse_to_be_trained() -> None:
    layer = Linear(torch.randn(8, 6))
    pack_weights(layer)
    with pytest.raises(RuntimeError, match="packed weights can't be trained"):
        layer(torch.randn(1, 2, 6, requires_grad=True))


def test_packing_twice_changes_nothing() -> None:
    layer = Linear(torch.randn(8, 6))
    pack_weights(layer)
    weight = layer.weight
    pack_weights(layer)
    assert layer.weight is weight


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64], ids=str)
def test_a_dtype_without_such_a_kernel_stays_as_it_is(dtype: torch.dtype) -> None:
    layer = Linear(torch.randn(8, 6, dtype=dtype))
    pack_weights(layer)
    assert not layer.weight.is_mkldnn
    assert linear(torch.randn(2, 6, dtype=dtype), layer.weight).dtype is dtype
