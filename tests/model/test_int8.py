"""Weights in eight bits: how much is lost, what does not depend on the rows of a pass, and what is
refused."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import d3d
from d3d.errors import InvalidRequest
from d3d.model import int8
from d3d.model.from_target import clean_rows_are_of
from d3d.model.int8 import (
    FEW_ROWS,
    Int8Blocks,
    Int8Exact,
    Int8Rows,
    Int8Weight,
    check_quantize,
    quantizations,
    quantize,
)
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


SHAPES = pytest.mark.parametrize("shape", [(130, 64), (64, 1536), (48, 40)], ids=str)


def assert_rows_come_to_the_same_bits(packed: Int8Weight, dtype: torch.dtype) -> None:
    """In a pass of any width up to FEW_ROWS, at any place in it, with any number of threads."""
    generator = torch.Generator().manual_seed(3)
    out_features, in_features = packed.to_dense().shape
    x = torch.randn(FEW_ROWS, in_features, generator=generator).to(dtype)
    for bias in (None, torch.randn(out_features, generator=generator).to(dtype)):
        alone = torch.cat([linear(x[i : i + 1], packed, bias) for i in range(len(x))])
        for rows in (2, 3, 5, 6, 8, 13, 16, 31, 32):
            assert torch.equal(linear(x[:rows], packed, bias), alone[:rows]), rows
            assert torch.equal(linear(x[-rows:], packed, bias), alone[-rows:]), rows
        assert torch.equal(linear(x.view(4, 8, -1), packed, bias).view(32, -1), alone)
        threads = torch.get_num_threads()
        torch.set_num_threads(1 if threads > 1 else 2)
        try:
            assert torch.equal(linear(x, packed, bias), alone)
        finally:
            torch.set_num_threads(threads)


@needs_kernel
@DTYPES
@SHAPES
def test_a_row_comes_to_the_same_bits_in_a_pass_of_any_width(
    dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    assert_rows_come_to_the_same_bits(Int8Weight.of(weight_like_a_models(*shape).to(dtype)), dtype)


@needs_kernel
@pytest.mark.parametrize("in_features", [40, 576, 1536, 4097])
def test_sums_of_bytes_are_exact_integers_rounded_once(in_features: int) -> None:
    """Of more than 24 bits, which float32 does not hold, and without overflow."""
    generator = torch.Generator().manual_seed(6)
    weight = torch.randint(-127, 128, (48, in_features), generator=generator)
    weight[0], weight[1], weight[2:, 0] = 127, -127, 127
    parts = torch.randint(0, 256, (7, in_features), generator=generator)
    parts[0], parts[1] = 255, 0
    exact = parts @ weight.T
    packed = Int8Weight.of(weight.float())
    assert isinstance(packed, (Int8Blocks, Int8Exact))
    for rows in (1, 2, 7):
        assert torch.equal(packed.sums(parts[:rows].byte()), exact[:rows].float())


@pytest.fixture
def probed_anew() -> Iterator[None]:
    """Kernels are probed once for a shape: forget what was found, before and after."""
    probes = int8._rows_are_steady, int8._sums_are_exact
    for probe in probes:
        probe.cache_clear()
    yield
    for probe in probes:
        probe.cache_clear()


def other_bits_at(kernel: Callable[..., torch.Tensor], *widths: int) -> Callable[..., torch.Tensor]:
    """The kernel of a processor on which passes of these widths are rounded in another way."""

    def product(rows: torch.Tensor, *others: Any) -> torch.Tensor:
        y = kernel(rows, *others)
        return y * (1 + 2.0**-7) if len(rows) in widths else y

    return product


def break_byte_kernel(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    rows = 2 * (3 if dtype is torch.float32 else 2)
    kernel = torch.ops.onednn.qlinear_pointwise
    monkeypatch.setattr(torch.ops.onednn, "qlinear_pointwise", other_bits_at(kernel, rows))


def break_weight_only_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = torch._weight_int8pack_mm
    monkeypatch.setattr(torch, "_weight_int8pack_mm", other_bits_at(kernel, 2))


@needs_kernel
@SHAPES
def test_rows_of_different_bits_are_found_where_the_kernel_is_trusted(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int]
) -> None:
    """So that the tests of what is done instead test something."""
    packed = Int8Blocks.pack(*quantize(weight_like_a_models(*shape)), torch.float32)
    break_byte_kernel(monkeypatch, torch.float32)
    with pytest.raises(AssertionError):
        assert_rows_come_to_the_same_bits(packed, torch.float32)


@needs_kernel
@DTYPES
@SHAPES
def test_without_any_steady_kernel_rows_still_come_to_the_same_bits(
    monkeypatch: pytest.MonkeyPatch,
    probed_anew: None,
    dtype: torch.dtype,
    shape: tuple[int, int],
) -> None:
    break_byte_kernel(monkeypatch, dtype)
    break_weight_only_kernel(monkeypatch)
    with pytest.warns(UserWarning, match="int8 kernels don't give a row the same bits"):
        packed = Int8Weight.of(weight_like_a_models(*shape).to(dtype))
    assert isinstance(packed, Int8Exact)
    assert_rows_come_to_the_same_bits(packed, dtype)


@needs_kernel
@SHAPES
def test_the_byte_kernel_gives_the_bits_of_exact_sums(shape: tuple[int, int]) -> None:
    weight = weight_like_a_models(*shape)
    x = torch.randn(5, shape[1], generator=torch.Generator().manual_seed(7))
    exact = Int8Exact.pack(*quantize(weight), torch.float32)
    assert torch.equal(linear(x, Int8Weight.of(weight)), linear(x, exact))
    assert torch.equal(Int8Weight.of(weight).to_dense(), exact.to_dense())


PRODUCT = """
import sys, torch, warnings
from d3d.model.int8 import Int8Weight
warnings.simplefilter("ignore")
x, weight = torch.load(sys.argv[1])
torch.save(Int8Weight.of(weight).product(x, None), sys.argv[1])
"""


@needs_kernel
@pytest.mark.parametrize("instructions", ["AVX2", "AVX512_CORE_VNNI"])
def test_kernels_for_other_processors_give_the_same_bits(tmp_path: Path, instructions: str) -> None:
    """Those for AVX2 let sums of two products overflow 16 bits; the probe finds that."""
    weight = weight_like_a_models(64, 1536)
    x = torch.randn(6, 1536, generator=torch.Generator().manual_seed(7))
    torch.save((x, weight), tmp_path / "product")
    subprocess.run(
        [sys.executable, "-c", PRODUCT, tmp_path / "product"],
        env=os.environ | {"ONEDNN_MAX_CPU_ISA": instructions},
        check=True,
        timeout=120,
    )
    assert torch.equal(torch.load(tmp_path / "product"), linear(x, Int8Weight.of(weight)))


@needs_kernel
def test_bfloat16_takes_two_bytes_if_its_own_kernel_is_not_steady(
    monkeypatch: pytest.MonkeyPatch, probed_anew: None
) -> None:
    weight = weight_like_a_models(64, 1536).bfloat16()
    x = torch.randn(5, 1536, generator=torch.Generator().manual_seed(7)).bfloat16()
    usual = Int8Rows.pack(*quantize(weight), torch.bfloat16)
    expected = linear(x, usual)
    break_weight_only_kernel(monkeypatch)
    packed = Int8Weight.of(weight)
    assert isinstance(packed, (Int8Blocks, Int8Exact))
    assert_rows_come_to_the_same_bits(packed, torch.bfloat16)
    torch.testing.assert_close(
        linear(x, packed), expected, rtol=2.0**-7, atol=0.01 * expected.abs().max().item()
    )
    assert torch.equal(packed.to_dense(), usual.to_dense())


@needs_kernel
@DTYPES
def test_a_kernel_is_probed_once_for_a_shape(
    monkeypatch: pytest.MonkeyPatch, probed_anew: None, dtype: torch.dtype
) -> None:
    first = Int8Weight.of(weight_like_a_models().to(dtype))
    break_byte_kernel(monkeypatch, dtype)
    break_weight_only_kernel(monkeypatch)
    assert type(Int8Weight.of(weight_like_a_models(seed=2).to(dtype))) is type(first)


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
    with pytest.raises(InvalidRequest, match="only d3d's own decoder"):
        d3d.load("anywhere", backend="transformers", quantize="int8")
