"""Rows of a drafting pass: each sequence's missing clean tokens, then the slots of its block.

Shorter sequences are padded between the two, so the slots are the pass's last rows for all of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from d3d.model.drafter import DrafterConfig
from d3d.model.masks.dense import dense
from d3d.model.masks.rules import CLEAN, NOWHERE, TRUNK, Rows, Rule, block_rules, union

MASKED = -1
"""Stands for a token that is not drafted yet."""


@dataclass(frozen=True)
class DraftLayout:
    """Tensors of one pass over `batch` sequences; keys are cache places, this pass's rows
    included."""

    token_ids: Tensor
    """int64 [batch, rows], MASKED at masked slots."""
    positions: Tensor
    """int64 [batch, rows]."""
    mask: Tensor
    """bool [batch, rows, keys]."""
    predicting: Tensor
    """int64 [batch, draft_length]: the row that predicts each drafted token."""
    num_clean: list[int]
    """Clean rows of each sequence: what the cache may keep."""
    num_slots: int


def draft_layout(
    config: DrafterConfig, cached: list[int], known: list[list[int]], blocks: Tensor
) -> DraftLayout:
    """Lay out a pass.

    cached[b]: clean tokens of sequence b in the cache; known[b]: all its tokens so far, the anchor
    last; blocks: int64 [batch, draft_length], drafted tokens so far, MASKED where open. The cache
    must end before the anchor, whose row a draft needs, be it clean or the first slot."""
    draft_length = blocks.shape[1]
    num_slots = config.num_slots(draft_length) if draft_length else 0
    anchor_slot = config.anchor_slot and draft_length > 0
    clean = [ids[:-1] for ids in known] if anchor_slot else known
    missing = [ids[done:] for done, ids in zip(cached, clean, strict=True)]
    num_clean = [len(ids) for ids in missing]
    width = max(num_clean)
    lengths = torch.tensor(cached)[:, None]
    last_seen = torch.tensor([len(ids) - 1 for ids in clean])[:, None]
    clean_ids = torch.tensor(
        [ids + [0] * (width - len(ids)) for ids in missing], dtype=torch.long
    ).reshape(len(known), width)
    clean_positions = lengths + torch.arange(width)
    slot_positions = last_seen + 1 + torch.arange(num_slots)
    rows = Rows.concatenate(
        Rows.clean(
            clean_positions
        ),  # padding stands behind the last clean token, where no real row looks
        Rows(
            slot_positions,
            last_seen.expand(-1, num_slots),
            torch.zeros_like(slot_positions),
            torch.zeros_like(slot_positions),
        ),
    )
    mask = pass_mask(union(block_rules(config.block_attention)), rows, cached)
    slot_ids = blocks[:, :num_slots]
    if anchor_slot:
        slot_ids = torch.cat((torch.tensor([ids[-1:] for ids in known]), blocks[:, :-1]), dim=1)
    if config.own_rows:
        own_rows = (
            width + torch.arange(draft_length - 1)
            if draft_length
            else torch.empty(0, dtype=torch.long)
        )
        last_clean = torch.tensor(num_clean)[:, None] - 1
        predicting = torch.cat((last_clean, own_rows.expand(len(known), -1)), dim=1)[
            :, :draft_length
        ]
    else:
        predicting = (width + torch.arange(draft_length)).expand(len(known), -1)
    return DraftLayout(
        token_ids=torch.cat((clean_ids, slot_ids), dim=1),
        positions=torch.cat(
            (clean_positions.clamp(max=last_seen.max().item()), slot_positions), dim=1
        ),
        mask=mask,
        predicting=predicting,
        num_clean=num_clean,
        num_slots=num_slots,
    )


def pass_mask(rule: Rule, rows: Rows, cached: list[int]) -> Tensor:
    """Who sees whom in a pass over `rows` (fields [batch, rows]) whose sequences have so many clean
    tokens in the cache: bool [batch, rows, keys]. Whatever the rule, a row must see all of its
    sequence's cached tokens: no pass asks less of the cache."""
    if min(cached) < max(cached):
        return dense(
            rule,
            rows,
            cache_places(rows, torch.tensor(cached)[:, None], max(cached) + rows.position.shape[1]),
        )
    own = dense(rule, rows, rows)
    return torch.cat((own.new_ones(*own.shape[:2], cached[0]), own), dim=-1)


def cache_places(rows: Rows, lengths: Tensor, num_keys: int) -> Rows:
    """What stands at each cache place of each sequence during the pass: cached clean tokens, then
    the pass's rows, then nothing."""
    places = torch.arange(num_keys).expand(lengths.shape[0], -1)
    row = places - lengths
    inside = (row >= 0) & (row < rows.position.shape[1])
    index = row.clamp(0, rows.position.shape[1] - 1)
    nowhere = torch.where(row < 0, places, NOWHERE)
    return Rows(
        torch.where(inside, rows.position.gather(1, index), nowhere),
        torch.where(inside, rows.anchor.gather(1, index), nowhere),
        torch.where(inside, rows.block.gather(1, index), CLEAN),
        torch.where(inside, rows.document.gather(1, index), TRUNK),
    )
