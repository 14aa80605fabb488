"""Attention of the training pass, without the scores that its mask forbids.

Two stores that equal dense attention under the drafter's masks and keep nothing, so gradients flow:
`BlockStore` on CPUs, for slots over a cached clean text, and `FlexStore` (FlexAttention) on GPUs.
FlexAttention has no derivative on a CPU, and `FlexStore` has not run on a GPU yet."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from d3d.model.kv_cache import KVCache
from d3d.model.masks.flex import mask_mod
from d3d.model.masks.rules import Rows, Rule


class BlockStore:
    """Key-value store for a pass of many blocks' slots: each slot attends to the clean text and to
    its own block only."""

    def __init__(
        self, cache: KVCache, num_blocks: int, context_mask: Tensor, block_mask: Tensor
    ) -> None:
        """context_mask: bool [num_blocks * num_slots, clean keys]; block_mask: bool [num_slots,
        num_slots], the same in every block."""
        self._cache = cache
        self._num_blocks = num_blocks
        self._context_bias = _bias(context_mask)
        self._block_bias = _bias(block_mask)

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None
    ) -> Tensor:
        """As `KeyValueStore.attend`, for batch 1; `mask` must be None."""
        assert mask is None
        assert query.shape[0] == 1
        heads, rows, head_dim = query.shape[1:]
        kv_heads = key.shape[1]
        past_keys, past_values = self._cache.read(layer, self._cache.lengths[0])
        length = past_keys.shape[2]
        grouped = query[0].reshape(kv_heads, heads // kv_heads, rows, head_dim) * head_dim**-0.5
        blocked = grouped.reshape(kv_heads, heads // kv_heads, self._num_blocks, -1, head_dim)
        own_keys = key[0].reshape(kv_heads, 1, self._num_blocks, -1, head_dim)
        own_values = value[0].reshape(kv_heads, 1, self._num_blocks, -1, head_dim)
        context = torch.matmul(grouped.flatten(1, 2), past_keys[0].transpose(1, 2))
        context = context.view(kv_heads, -1, rows, length)
        own = torch.matmul(blocked, own_keys.transpose(-1, -2))
        scores = torch.cat(
            (
                context + self._context_bias.to(query.dtype),
                (own + self._block_bias.to(query.dtype)).flatten(2, 3),
            ),
            dim=-1,
        )
        weights = scores.softmax(-1)
        context_weights, own_weights = weights.split((length, own_keys.shape[3]), dim=-1)
        out = torch.matmul(context_weights.flatten(1, 2), past_values[0])
        out = out.view(kv_heads, -1, rows, head_dim)
        out = out + torch.matmul(own_weights.reshape(own.shape), own_values).flatten(2, 3)
        return out.flatten(0, 1).transpose(0, 1).flatten(1)[None]


class FlexStore:
    """Key-value store whose mask is a rule, so that neither mask nor scores are stored."""

    def __init__(self, rule: Rule, query: Rows, key: Rows, cache: KVCache | None = None) -> None:
        """query: the pass's rows, fields [rows]; key: fields [keys], the clean text of `cache`, if
        any, then the pass's rows."""
        self._cache = cache
        rows, keys = query.position.shape[0], key.position.shape[0]
        device = query.position.device
        visible = mask_mod(rule, query[None], key[None])
        self._visible = create_block_mask(visible, 1, None, rows, keys, device=device)
        self._attention = _kernel(device.type)

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None
    ) -> Tensor:
        """As `KeyValueStore.attend`, for batch 1; `mask` must be None."""
        assert mask is None
        assert query.shape[0] == 1
        if self._cache is not None:
            past_keys, past_values = self._cache.read(layer, self._cache.lengths[0])
            key, value = torch.cat((past_keys, key), dim=2), torch.cat((past_values, value), dim=2)
        out: Tensor = self._attention(query, key, value, block_mask=self._visible, enable_gqa=True)
        return out.transpose(1, 2).flatten(2)


def _bias(mask: Tensor) -> Tensor:
    return torch.zeros(mask.shape, device=mask.device).masked_fill(~mask, float("-inf"))


@cache
def _kernel(device_type: str) -> Callable[..., Any]:
    """Compiled on GPUs only; elsewhere it serves comparisons."""
    kernel: Callable[..., Any] = flex_attention
    return torch.compile(kernel) if device_type == "cuda" else kernel
