"""Grouped-query attention with an explicit mask."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

FUSED_ROWS = 32
"""Maximum rows of one sequence for which the fused kernel beats tiles."""

TILE = 1 << 20
"""Maximum scores (batch x heads x rows x keys) in memory at one time on a CPU: more would overflow
its caches and touch fresh pages."""


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    """query [batch, heads, rows, head_dim], key and value [batch, kv_heads, keys, head_dim], mask
    bool [batch or 1, rows, keys] (True = visible; None = every key is visible to every row) or a
    `grouped_bias` -> [batch, rows, heads * head_dim]."""
    if query.device.type == "cpu" and not query.requires_grad:
        out = (
            _grouped_fused(query, key, value, mask)
            if are_few(query.shape[0], query.shape[2])
            else _tiled(query, key, value, mask)
        )
    else:
        out = F.scaled_dot_product_attention(
            query, key, value, None if mask is None else mask[:, None], enable_gqa=True
        )
    return out.transpose(1, 2).flatten(2)


def are_few(batch: int, rows: int) -> bool:
    """True if a pass without gradients uses the fused kernel on a CPU."""
    return batch == 1 and rows <= FUSED_ROWS


def grouped_bias(mask: Tensor, group: int, dtype: torch.dtype) -> Tensor:
    """Mask as the fused kernel adds it, for all layers of a pass whose rows `are_few`: [batch or 1,
    1, group * rows, keys], 0 if visible. group: query heads that share a key head."""
    bias = torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(
        ~mask, float("-inf")
    )
    return bias.repeat(1, group, 1)[:, None]


def _grouped_fused(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    """Attend with the fused kernel, a group's query heads as further rows: fastest on a CPU for one
    sequence and few rows."""
    batch, heads, rows, head_dim = query.shape
    kv_heads = key.shape[1]
    group = heads // kv_heads
    grouped = query.reshape(batch, kv_heads, group * rows, head_dim)
    if mask is not None and mask.dtype is torch.bool:
        mask = grouped_bias(mask, group, query.dtype)
    return F.scaled_dot_product_attention(grouped, key, value, mask).view(
        batch, heads, rows, head_dim
    )


def _tiled(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    """Attend with two grouped matmuls per tile of queries: on a CPU several times faster than the
    fused kernel (masked bf16 above all)."""
    batch, heads, rows, _ = query.shape
    scores_a_row = heads * key.shape[2]
    if batch * rows * scores_a_row <= TILE:
        return _grouped_matmul(query, key, value, mask)
    sequences = max(1, TILE // (rows * scores_a_row))
    step = max(1, TILE // (sequences * scores_a_row))
    out = torch.empty_like(query)
    for first in range(0, batch, sequences):
        b = slice(first, first + sequences)
        for start in range(0, rows, step):
            r = slice(start, start + step)
            tile_mask = None if mask is None else mask[b if mask.shape[0] > 1 else slice(None), r]
            out[b, :, r] = _grouped_matmul(query[b, :, r], key[b], value[b], tile_mask)
    return out


def _grouped_matmul(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    batch, heads, rows, head_dim = query.shape
    kv_heads = key.shape[1]
    grouped = query.reshape(batch, kv_heads, heads // kv_heads * rows, head_dim) * head_dim**-0.5
    scores = torch.matmul(grouped, key.transpose(2, 3)).float()
    if mask is not None:
        split = scores.view(batch, kv_heads, heads // kv_heads, rows, -1)
        split.masked_fill_(~mask[:, None, None], float("-inf"))
    weights = scores.softmax(-1).to(value.dtype)
    return torch.matmul(weights, value).view(batch, heads, rows, head_dim)
