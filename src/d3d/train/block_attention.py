"""Attention of many blocks' slots over one cached clean text, without the scores between blocks
that the mask forbids.

Equal to dense attention with the drafter's mask: each slot's scores are those over the clean text
and those over its own block."""

from __future__ import annotations

import torch
from torch import Tensor

from d3d.model.kv_cache import KVCache


class BlockAttention:
    """A key-value store for one pass of slots only; it stores nothing, so gradients may flow."""

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
        """As `KeyValueStore.attend`, for batch 1; the masks are those of the constructor and `mask`
        must be None."""
        assert mask is None
        assert query.shape[0] == 1
        heads, rows, head_dim = query.shape[1:]
        kv_heads = key.shape[1]
        past_keys, past_values = self._cache.read(layer, self._cache.lengths[0])
        grouped = query[0].reshape(kv_heads, heads // kv_heads, rows, head_dim) * head_dim**-0.5
        blocked = grouped.reshape(kv_heads, heads // kv_heads, self._num_blocks, -1, head_dim)
        own_keys = key[0].reshape(kv_heads, 1, self._num_blocks, -1, head_dim)
        own_values = value[0].reshape(kv_heads, 1, self._num_blocks, -1, head_dim)
        context = torch.matmul(grouped.flatten(1, 2), past_keys[0].transpose(1, 2)).view(
            kv_heads, -1, rows, past_keys.shape[2]
        )
        own = torch.matmul(blocked, own_keys.transpose(-1, -2))
        scores = torch.cat(
            (
                context + self._context_bias.to(query.dtype),
                (own + self._block_bias.to(query.dtype)).flatten(2, 3),
            ),
            dim=-1,
        )
        weights = scores.softmax(-1)
        context_weights, own_weights = weights.split(
            (past_keys.shape[2], own_keys.shape[3]), dim=-1
        )
        out = torch.matmul(context_weights.flatten(1, 2), past_values[0]).view(
            kv_heads, -1, rows, head_dim
        )
        out = out + torch.matmul(own_weights.reshape(own.shape), own_values).flatten(2, 3)
        return out.flatten(0, 1).transpose(0, 1).flatten(1)[None]


def _bias(mask: Tensor) -> Tensor:
    return torch.zeros(mask.shape, device=mask.device).masked_fill(~mask, float("-inf"))
