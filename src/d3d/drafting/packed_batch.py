"""Packed passes of several sequences as one: their rows side by side, nothing padded, each with its
own cache and mask.

Clean rows of all come first, then the slots of all, so that the slots are the pass's last rows as
they are in each pass alone."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from d3d.drafting.packed_layout import PackedLayout
from d3d.model.drafter import DrafterModel
from d3d.model.kv_cache import KVCache, Share, SideBySide


def run_side_by_side(
    model: DrafterModel, layouts: Sequence[PackedLayout], caches: Sequence[KVCache]
) -> list[Tensor]:
    """One pass over sequences whose `caches` hold one each: for every layout the states that
    predict, [branches, draft_length + 1, hidden_size]. The caches have the rows behind their
    tokens, and keep of them what they are told to keep."""
    device = model.transformer.device
    if len(layouts) == 1:
        (layout,), (cache,) = layouts, caches
        hidden = model.hidden(
            layout.token_ids, layout.rows.position, layout.mask, cache, layout.num_slots
        )
        return [hidden[0, layout.predicting.to(device)]]
    num_clean = [layout.token_ids.shape[1] - layout.num_slots for layout in layouts]
    places = _places(num_clean, [layout.num_slots for layout in layouts])
    shares = [
        Share(cache, rows.to(device), count, layout.mask.to(device))
        for cache, rows, count, layout in zip(caches, places, num_clean, layouts, strict=True)
    ]
    order = torch.cat(places).argsort()
    token_ids = torch.cat([layout.token_ids[0] for layout in layouts])[order]
    positions = torch.cat([layout.rows.position[0] for layout in layouts])[order]
    num_slots = len(order) - sum(num_clean)
    hidden = model.hidden(token_ids[None], positions[None], None, SideBySide(shares), num_slots)
    return [
        hidden[0, rows[layout.predicting].to(device)]
        for rows, layout in zip(places, layouts, strict=True)
    ]


def _places(num_clean: list[int], num_slots: list[int]) -> list[Tensor]:
    """Where in the pass each sequence's rows stand, int64 [its clean rows + its slots]."""
    clean = torch.arange(sum(num_clean)).split(num_clean)
    slots = (sum(num_clean) + torch.arange(sum(num_slots))).split(num_slots)
    return [torch.cat(pair) for pair in zip(clean, slots, strict=True)]
