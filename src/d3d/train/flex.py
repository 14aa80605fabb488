"""Training's attention on a GPU: FlexAttention with the rules of `d3d.model.masks.rules`, so that
no mask and no scores are stored.

Equal to the dense masks of a CPU. It has run on no GPU yet; without one, FlexAttention has no
derivative."""

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


class FlexStore:
    """A key-value store for one pass; it stores nothing, so gradients may flow."""

    def __init__(self, rule: Rule, query: Rows, key: Rows, cache: KVCache | None = None) -> None:
        """query: the pass's rows, fields [rows]; key: what they may look at, fields [keys]: the
        clean text of `cache` where there is one, then the pass's rows."""
        self._cache = cache
        rows, keys = query.position.shape[0], key.position.shape[0]
        device = query.position.device
        self._visible = create_block_mask(
            mask_mod(rule, query[None], key[None]), 1, None, rows, keys, device=device
        )
        self._attention = _kernel(device.type)

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None
    ) -> Tensor:
        """As `KeyValueStore.attend`, for batch 1; the mask is that of the constructor and `mask`
        must be None."""
        assert mask is None
        assert query.shape[0] == 1
        if self._cache is not None:
            past_keys, past_values = self._cache.read(layer, self._cache.lengths[0])
            key, value = torch.cat((past_keys, key), dim=2), torch.cat((past_values, value), dim=2)
        out: Tensor = self._attention(query, key, value, block_mask=self._visible, enable_gqa=True)
        return out.transpose(1, 2).flatten(2)


@cache
def _kernel(device_type: str) -> Callable[..., Any]:
    """Compiled where that is what makes it quick; elsewhere as it is, for comparison."""
    kernel: Callable[..., Any] = flex_attention
    return torch.compile(kernel) if device_type == "cuda" else kernel
