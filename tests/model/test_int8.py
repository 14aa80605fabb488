"""Weights in eight bits: how much is lost, what does not depend on the rows of a pass, and what is
refused."""

from __future__ import annotations

import pytest
import torch

import d3d
from d3d.errors import InvalidRequest
from d3d.model import int8
from d3d.model.from_target import clean_rows_are_of
from d3d.model.int8 import FEW_ROWS, Int8Weight, check_quantize, quantizations, quantize
from d3d.model.linear import Linear, linear, merge_deltas, pack_weights
from support.drafters import tiny_drafter
from support.tiny import tiny_transformer

CPU = torch.device("cpu")
needs_kernel = pytest.mark.skipif(
    not quantizations(CPU), reason="this processor does not multiply bytes"
)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


def weight_like_a_models(
    out_features: int = 130, in_features: int = 72, seed: int = 1
) -> torch.Tensor:
    """Rows of very different size, one of nothing but zeros."""
    generator = torch.Generator().manual_seed(seed)
    weight = (
        torch.randn(out_features, in_features, generator=generator)
        * 10 ** torch.linspace(-3, 1, out_features)[:, None]
    )
    weight[3] = 0
    return weight


@DTYPES
def test_no_weight_is_off_by_more_than_half_a_step_of_its_row(dtype: torch.dtype) -> None:
    weight = weight_like_a_models().to(dtype).float()
    whole, scales = quantize(weight.to(dtype))
    assert whole.dtype is torch.int8
    assert whole.min() >= -127
    torch.testing.assert_close(
        scales,
        weight.abs().amax(1) / 127,
        rtol=2.0**-8 if dtype is torch.bfloat16 else 1e-6,
        atol=0,
    )
    assert torch.equal(scales, scales.to(dtype).float())
    assert ((whole * scales[:, None] - weight).abs() <= scales[:, None] * 0.5001).all()


@needs_kernel
@DTYPES
def test_packing_keeps_every_rounded_weight(dtype: torch.dtype) -> None:
    weight = weight_like_a_models().to(dtype)
    whole, scales = quantize(weight)
    torch.testing.assert_close(
        Int8Weight.of(weight).to_dense(torch.float64),
        whole * scales[:, None].double(),
        rtol=1e-6,
        atol=0,
    )


@needs_kernel
@DTYPES
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("in_features", [64, 72])
def test_a_product_is_that_of_the_rounded_weight(
    dtype: torch.dtype, in_features: int, bias: bool
) -> None:
    """As exact as the dtype: nothing but the weight loses precision, not even beside an activation
    that is a thousand times the others."""
    generator = torch.Generator().manual_seed(2)
    packed = Int8Weight.of(weight_like_a_models(130, in_features).to(dtype))
    added = torch.randn(130, generator=generator).to(dtype) if bias else None
    x = torch.randn(2, 5, in_features, generator=generator)
    x[1, 2, 7] = 1000
    x[0, 1] = 0
    x = x.to(dtype)
    alone = x.double() @ packed.to_dense(torch.float64).T
    exact = alone if added is None else alone + added.double()
    made = linear(x, packed, added)
    assert made.dtype is dtype
    many = linear(x.repeat(1, 8, 1), packed, added)[:, :5]
    sizes = x.double().abs().amax(-1, keepdim=True) * packed.to_dense(torch.float64).abs().sum(1)
    relative = {torch.float32: 1e-6, torch.bfloat16: 2.0**-7}[dtype]
    for product in (made, many):
        assert (
            (product.double() - exact).abs()
            <= relative * (exact.abs() + alone.abs()) + sizes / int8.SPLITS[dtype].reach
        ).all()


@needs_kernel
@DTYPES
@pytest.mark.parametrize("shape", [(130, 64), (64, 1536), (48, 40)], ids=str)
def test_a_row_comes_to_the_same_bits_in_a_pass_of_any_width(
    dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    packed = Int8Weight.of(weight_like_a_models(*shape).to(dtype))
    x = torch.randn(FEW_ROWS, shape[1], generator=torch.Generator().manual_seed(3)).to(dtype)
    alone = torch.cat([linear(x[i : i + 1], packed) for i in range(len(x))])
    for rows in (2, 3, 5, 6, 8, 13, 16, 31, 32):
        assert torch.equal(linear(x[:rows], packed), alone[:rows]), rows
    assert torch.equal(linear(x.view(4, 8, -1), packed).view(32, -1), alone)
    threads = torch.get_num_threads()
    torch.set_num_threads(1 if threads > 1 else 2)
    try:
        assert torch.equal(linear(x, packed), alone)
    finally:
        torch.set_num_threads(threads)


@needs_kernel
@DTYPES
def test_nan_and_infinity_stay_visible_and_in_their_row(dtype: torch.dtype) -> None:
    packed = Int8Weight.of(weight_like_a_models(130, 64)[4:].to(dtype))
    x = torch.ones(3, 64, dtype=dtype)
    clean = linear(x, packed)
    x[0, 5], x[1, 5] = float("nan"), float("inf")
    made = linear(x, packed)
    assert made[0].isnan().all()
    assert not made[1].isfinite().any()
    assert torch.equal(made[2], clean[2])


@needs_kernel
def test_a_packed_model_takes_a_quarter_of_float32_and_keeps_its_embedding() -> None:
    base, rounded = tiny_transformer(seed=1), tiny_transformer(seed=1)
    pack_weights(rounded, quantize="int8")
    layers = [module for module in rounded.modules() if isinstance(module, Linear)]
    assert all(isinstance(layer.weight, Int8Weight) for layer in layers)
    before = sum(
        module.weight.numel() * module.weight.element_size()
        for module in base.modules()
        if isinstance(module, Linear)
    )
    after = sum(layer.weight.numel() * layer.weight.element_size() for layer in layers)
    assert after * 4 == before
    assert torch.equal(rounded.embedding, base.embedding)


@needs_kernel
def test_target_and_drafter_go_on_sharing_weights_and_deltas_stay_as_they_are() -> None:
    base = tiny_transformer(seed=1)
    model = tiny_drafter(base)
    pack_weights(base, model, quantize="int8")
    assert clean_rows_are_of(model, base)
    own, theirs = model.transformer.layers[0].qkv, base.layers[0].qkv  # type: ignore[union-attr]
    assert own.weight is theirs.weight
    assert own.down.dtype is torch.float32


@needs_kernel
def test_what_deltas_were_merged_into_is_rounded_too() -> None:
    layer = Linear(weight_like_a_models())
    generator = torch.Generator().manual_seed(4)
    layer.add_delta(
        torch.randn(4, 72, generator=generator), torch.randn(130, 4, generator=generator)
    )
    x = torch.randn(1, 3, 72, generator=generator)
    with torch.inference_mode():
        exact = layer(x, 3)
        merge_deltas(layer)
        pack_weights(layer, quantize="int8")
        assert isinstance(layer.merged, Int8Weight)
        torch.testing.assert_close(layer(x, 3), exact, atol=0.02 * exact.abs().max().item(), rtol=0)


@needs_kernel
def test_activations_that_lie_anywhere_in_memory() -> None:
    """The kernel wants them aligned."""
    packed = Int8Weight.of(weight_like_a_models(130, 64).bfloat16())
    store = torch.randn(1 + 3 * 64, generator=torch.Generator().manual_seed(5)).bfloat16()
    odd = store[1:].view(3, 64)
    assert torch.equal(linear(odd, packed), linear(odd.clone(), packed))
    assert torch.equal(
        linear(odd.repeat(1, 2)[:, ::2], packed),
        linear(odd.repeat(1, 2)[:, ::2].contiguous(), packed),
    )


@needs_kernel
@DTYPES
def test_an_untied_head_can_still_be_looked_up(dtype: torch.dtype) -> None:
    head = Linear(weight_like_a_models(130, 64).to(dtype))
    before = head.weight.float()
    pack_weights(head, quantize="int8")
    assert head.weight.is_mkldnn, "so that whoever wants its rows asks for to_dense"
    rows = head.weight.to_dense()
    assert (rows.dtype, rows.shape) == (dtype, (130, 64))
    assert ((rows.float() - before).abs() <= before.abs().amax(1, keepdim=True) / 127).all()


@needs_kernel
def test_rounded_weights_refuse_to_be_trained() -> None:
    with pytest.raises(RuntimeError, match="packed weights can't be trained"):
        linear(torch.randn(2, 72, requires_grad=True), Int8Weight.of(weight_like_a_models()))


def test_what_is_unknown_or_not_to_be_had_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    check_quantize(None, CPU)
    with pytest.raises(InvalidRequest, match="'int4' is not supported; use int8"):
        check_quantize("int4", CPU)
    with pytest.raises(InvalidRequest, match="runs on a CPU only, not on cuda"):
        check_quantize("int8", torch.device("cuda"))
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx2": True})
    assert quantizations(CPU) == ()
    with pytest.raises(InvalidRequest, match="needs a processor with VNNI"):
        check_quantize("int8", CPU)
    with pytest.raises(InvalidRequest, match="only d3d's own engine"):
        d3d.load("anywhere", engine="transformers", quantize="int8")
