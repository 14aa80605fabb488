from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from d3d.model import attention
from d3d.model.attention import attend


def naive(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    """One query row and one head at a time, in float64."""
    batch, heads, rows, head_dim = query.shape
    share = heads // key.shape[1]
    out = torch.zeros(batch, rows, heads, head_dim, dtype=torch.float64)
    for b in range(batch):
        for h in range(heads):
            keys, values = key[b, h // share].double(), value[b, h // share].double()
            for r in range(rows):
                scores = keys @ query[b, h, r].double() / head_dim**0.5
                if mask is not None:
                    scores = scores.masked_fill(
                        ~mask[b if mask.shape[0] > 1 else 0, r], float("-inf")
                    )
                out[b, r, h] = scores.softmax(0) @ values
    return out.flatten(2)


def case(
    batch: int, rows: int, keys: int, mask: str, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    generator = torch.Generator().manual_seed(rows + keys)
    query = torch.randn(batch, 6, rows, 8, generator=generator).to(dtype)
    key, value = (torch.randn(batch, 2, keys, 8, generator=generator).to(dtype) for _ in range(2))
    if mask == "none":
        return query, key, value, None
    visible = torch.rand(batch if mask == "each" else 1, rows, keys, generator=generator) < 0.6
    visible[..., 0] = True
    return query, key, value, visible


@pytest.mark.parametrize("mask", ["none", "shared", "each"])
@pytest.mark.parametrize(
    ("batch", "rows", "keys"), [(1, 1, 1), (1, 1, 9), (3, 1, 9), (1, 5, 12), (3, 7, 10)]
)
@pytest.mark.parametrize("tile", [1, 100, 700, 1 << 20])
def test_tiles_fused_kernel_and_loop_agree(
    mask: str, batch: int, rows: int, keys: int, tile: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "TILE", tile)
    query, key, value, visible = case(batch, rows, keys, mask, torch.float32)
    expected = naive(query, key, value, visible).float()
    fused = F.scaled_dot_product_attention(
        query, key, value, None if visible is None else visible[:, None], enable_gqa=True
    )
    torch.testing.assert_close(attend(query, key, value, visible), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(fused.transpose(1, 2).flatten(2), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("mask", ["none", "shared", "each"])
@pytest.mark.parametrize("tile", [100, 1 << 20])
def test_bfloat16_is_right_within_its_rounding(
    mask: str, tile: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "TILE", tile)
    query, key, value, visible = case(2, 7, 10, mask, torch.bfloat16)
    out = attend(query, key, value, visible)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(
        out.double(), naive(query, key, value, visible), atol=0.03, rtol=0.03
    )


def test_both_paths_give_the_same_gradients() -> None:
    query, key, value, visible = case(2, 5, 12, "each", torch.float32)
    leaves = [tensor.requires_grad_() for tensor in (query, key, value)]
    with torch.enable_grad():
        attend(query, key, value, visible).square().sum().backward()
    fused = [leaf.grad for leaf in leaves]
    for leaf in leaves:
        leaf.grad = None
    assert visible is not None
    by_hand = attention._grouped_matmul(query, key, value, visible)
    by_hand.square().sum().backward()
    for leaf, gradient in zip(leaves, fused, strict=True):
        torch.testing.assert_close(leaf.grad, gradient, atol=1e-5, rtol=1e-5)


def test_a_hidden_key_changes_nothing() -> None:
    query, key, value, visible = case(1, 5, 12, "shared", torch.float32)
    assert visible is not None
    visible[..., 7] = False
    before = attend(query, key, value, visible)
    key[:, :, 7], value[:, :, 7] = 50.0, -50.0
    assert torch.equal(attend(query, key, value, visible), before)
