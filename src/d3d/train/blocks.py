"""The training pass: a clean text, and the slots of many blocks hung at anchors inside its answer.

If deltas act at slots only, clean rows have nothing to learn: they run once without gradients, and
the slots attend to their keys and values. Otherwise one pass with gradients holds clean rows and
slots. The masks are those of drafting."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from d3d.model.drafter import DrafterConfig, DrafterModel
from d3d.model.kv_cache import KeyValueStore, KVCache, PassThrough
from d3d.model.masks.dense import dense
from d3d.model.masks.rules import Rows, Rule, block_rules, union
from d3d.train.attention import BlockStore, FlexStore


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
def clean_pass(model: DrafterModel, token_ids: Tensor) -> tuple[Tensor, KVCache]:
    """token_ids int64 [length] -> final hidden states [length, hidden_size], and the text's
    cache."""
    length = len(token_ids)
    cache = model.transformer.new_cache(1, length)
    clean = Rows.clean(torch.arange(length, device=token_ids.device))
    mask = dense(_rule(model), clean, clean)[None]
    hidden = model.hidden(token_ids[None], clean.position[None], mask, cache, 0)
    cache.advance([length])
    return hidden[0], cache


def slot_pass(model: DrafterModel, cache: KVCache, batch: BlockBatch) -> Tensor:
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
