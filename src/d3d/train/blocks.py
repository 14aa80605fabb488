"""The training pass: a clean text, and the slots of many blocks hung at anchors inside its answer.

If deltas act at slots only, clean rows have nothing to learn: they run once without gradients, and
the slots attend to their keys and values. Otherwise one pass with gradients holds clean rows and
slots. The masks are those of drafting.

Attention skips the scores that the mask forbids. Its stores equal dense attention and keep nothing,
so gradients flow: `BlockStore` on CPUs, `FlexStore` (FlexAttention) on GPUs. FlexAttention has no
derivative on a CPU, and `FlexStore` has not run on a GPU yet."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache as cached
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from d3d.model.drafter import DrafterConfig, DrafterModel
from d3d.model.kv_cache import KeyValueStore, PassThrough, Window
from d3d.model.masks.dense import dense
from d3d.model.masks.flex import mask_mod
from d3d.model.masks.rules import Rows, Rule, block_rules, union


@dataclass(frozen=True)
class BlockBatch:
    """Slots of `num_blocks` blocks over one text, block by block."""

    rows: Rows
    """Fields int64 [num_blocks * num_slots]."""
    token_ids: Tensor
    """int64 [num_blocks * num_slots]; negative at masked slots."""
    targets: Tensor
    """int64 [num_blocks, num_slots]: position in the text of the token that each slot predicts; may
    lie past its end."""


def hang_blocks(text: Tensor, anchors: Tensor, num_slots: int, config: DrafterConfig) -> BlockBatch:
    """Blocks of `num_slots` slots at anchors. text: token ids, int64 [length]; anchors: positions
    in it, int64 [num_blocks]."""
    last_seen = anchors - 1 if config.anchor_slot else anchors
    positions = last_seen[:, None] + torch.arange(1, num_slots + 1, device=anchors.device)
    blocks = torch.arange(len(anchors), device=anchors.device)[:, None].expand_as(positions)
    token_ids = torch.full_like(positions, -1)
    if config.anchor_slot:
        token_ids[:, 0] = text[anchors]
    rows = Rows(
        positions.flatten(),
        last_seen[:, None].expand_as(positions).flatten(),
        blocks.flatten(),
        torch.zeros_like(positions).flatten(),
    )
    targets = positions + 1 if config.alignment == "next" else positions
    return BlockBatch(rows, token_ids.flatten(), targets)


@torch.no_grad()
def clean_pass(model: DrafterModel, token_ids: Tensor) -> tuple[Tensor, Window]:
    """token_ids int64 [length] -> final hidden states [length, hidden_size], and the text's
    cache."""
    length = len(token_ids)
    cache = model.transformer.new_cache()
    cache.open(0, length)
    window = cache.window([0])
    clean = Rows.clean(torch.arange(length, device=token_ids.device))
    mask = dense(_rule(model), clean, clean)[None]
    hidden = model.hidden(token_ids[None], clean.position[None], mask, window, 0)
    window.advance([length])
    return hidden[0], window


def slot_pass(model: DrafterModel, cache: Window, batch: BlockBatch) -> Tensor:
    """Hidden states of all slots over a cached clean text, [num_blocks * num_slots, hidden_size];
    gradients flow to the slots' weights."""
    rows, rule = batch.rows, _rule(model)
    num_blocks, num_slots = batch.targets.shape
    clean = Rows.clean(torch.arange(cache.lengths[0], device=rows.position.device))
    store: KeyValueStore
    if rows.position.device.type == "cuda":
        store = FlexStore(rule, rows, Rows.concatenate(clean, rows), cache)
    else:
        block = rows[:num_slots]  # inside, all blocks have the same mask
        context_mask, block_mask = dense(rule, rows, clean), dense(rule, block, block)
        store = BlockStore(cache, num_blocks, context_mask, block_mask)
    count = len(rows.position)
    return model.hidden(batch.token_ids[None], rows.position[None], None, store, count)[0]


def joint_pass(model: DrafterModel, token_ids: Tensor, batch: BlockBatch) -> tuple[Tensor, Tensor]:
    """Hidden states of the clean rows [length, hidden_size] and of the slots, all with
    gradients."""
    length, count = len(token_ids), len(batch.rows.position)
    rows = Rows.concatenate(Rows.clean(torch.arange(length, device=token_ids.device)), batch.rows)
    rule, ids = _rule(model), torch.cat((token_ids, batch.token_ids))
    mask, store = None, None
    # in layers that slots skip, clean rows run alone, under another mask
    if token_ids.device.type == "cuda" and not model.config.skipped:
        store = FlexStore(rule, rows, rows)
    else:
        mask = dense(rule, rows, rows)[None]
    hidden = model.hidden(ids[None], rows.position[None], mask, store or PassThrough(), count)[0]
    return hidden[:length], hidden[length:]


def _rule(model: DrafterModel) -> Rule:
    return union(block_rules(model.config.block_attention))


class BlockStore:
    """Key-value store for a pass of many blocks' slots: each slot attends to the clean text and to
    its own block only."""

    def __init__(
        self, cache: Window, num_blocks: int, context_mask: Tensor, block_mask: Tensor
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

    def __init__(self, rule: Rule, query: Rows, key: Rows, cache: Window | None = None) -> None:
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


@cached
def _kernel(device_type: str) -> Callable[..., Any]:
    """Compiled on GPUs only; elsewhere it serves comparisons."""
    kernel: Callable[..., Any] = flex_attention
    return torch.compile(kernel) if device_type == "cuda" else kernel
