"""Rows of a fused pass: each sequence's anchor and drafted tokens, clean, then a group of slots
hung at each of them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from d3d.drafting.layout import MASKED, pass_mask
from d3d.model.drafter import DrafterConfig
from d3d.model.masks.rules import Rows, block_rules, union

NO_GROUP = 1 << 20
"""Block number of slots that only fill up a batch: nobody sees them."""


class FusedLayout(NamedTuple):
    """Tensors of one pass over `batch` sequences; keys are cache places, this pass's rows
    included."""

    token_ids: Tensor
    """int64 [batch, width + num_slots], MASKED at slots."""
    positions: Tensor
    """int64 [batch, width + num_slots]."""
    mask: Tensor
    """bool [batch, width + num_slots, keys]."""
    width: int
    """Clean rows, padding included."""
    num_slots: int


def fused_layout(
    config: DrafterConfig,
    cached: list[int],
    clean_ids: list[list[int]],
    groups: list[tuple[int, ...]],
) -> FusedLayout:
    """cached[b]: tokens of sequence b in the cache; clean_ids[b]: its anchor and drafted tokens;
    groups[b][i]: slots to hang at row i, fewer entries than rows where the last rows have none."""
    width = max(len(ids) for ids in clean_ids)
    slots = [
        [(row, depth) for row, size in enumerate(sizes) for depth in range(1, size + 1)]
        for sizes in groups
    ]
    num_slots = max(len(places) for places in slots)
    filled = torch.tensor(
        [places + [(0, NO_GROUP)] * (num_slots - len(places)) for places in slots]
    ).reshape(len(slots), num_slots, 2)
    row, depth = filled.unbind(-1)
    lengths = torch.tensor(cached)[:, None]
    clean_positions = lengths + torch.arange(
        width
    )  # padding stands behind the last drafted token, where no row looks
    anchors = lengths + row
    idle = depth == NO_GROUP
    slot_positions = torch.where(idle, anchors, anchors + depth)
    rows = Rows.concatenate(
        Rows.clean(clean_positions),
        Rows(slot_positions, anchors, torch.where(idle, NO_GROUP, row), torch.zeros_like(row)),
    )
    ids = torch.tensor([ids + [0] * (width - len(ids)) for ids in clean_ids])
    return FusedLayout(
        token_ids=torch.cat((ids, torch.full((len(slots), num_slots), MASKED)), dim=1),
        positions=rows.position,
        mask=pass_mask(union(block_rules(config.block_attention)), rows, cached),
        width=width,
        num_slots=num_slots,
    )
