"""Masks for FlexAttention (GPUs): invisible tiles are never computed, and no dense mask is
stored."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from d3d.model.masks.rules import Rows, Rule


def mask_mod(
    rule: Rule, query: Rows, key: Rows
) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """`mask_mod` of a rule, for `torch.nn.attention.flex_attention.create_block_mask`.

    query fields [batch, rows], key fields [batch, keys], on the device of the attention; all heads
    share the mask."""

    def visible(batch: Tensor, head: Tensor, query_index: Tensor, key_index: Tensor) -> Tensor:  # noqa: ARG001 - FlexAttention's signature
        return rule(query[batch, query_index], key[batch, key_index])

    return visible
