"""Rows of a packed pass: the trunk (missing committed tokens, then the draft under verification), the branches' anchors, their slots.

Deltas that act at slots only act on a pass's last rows, so the slots stand last.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from d3d.core.types import Outcome
from d3d.drafting.layout import MASKED, cache_places
from d3d.masks.dense import dense
from d3d.masks.rules import CLEAN, GUESS, Rows, packed_rules, union
from d3d.models.drafter import DrafterConfig


@dataclass(frozen=True)
class PackedLayout:
    """Tensors of one pass over one sequence; keys are cache places, this pass's rows included."""

    token_ids: Tensor
    """int64 [1, rows], MASKED at slots."""
    rows: Rows
    """Fields int64 [1, rows]: what the mask is made of."""
    mask: Tensor
    """bool [1, rows, keys]."""
    predicting: Tensor
    """int64 [branches, draft_length + 1]: the row that predicts each drafted token of each branch, and then the token behind them."""
    num_slots: int


def packed_layout(
    config: DrafterConfig, cached: int, text: list[int], draft: Sequence[int], outcomes: Sequence[Outcome], draft_length: int
) -> PackedLayout:
    """Lay out a pass that drafts `draft_length` tokens behind every outcome of `draft`, which hangs at the last token of `text`.

    cached: tokens of `text` that are in the cache. A branch's last slot is its guess slot: what would follow the whole successor.
    """
    trunk = [*text[cached:], *draft]
    width, branches = len(trunk), len(outcomes)
    num_slots = config.num_slots(draft_length) + 1
    anchors = len(text) + torch.tensor([outcome.num_accepted for outcome in outcomes])
    document = 1 + torch.arange(branches)
    block = torch.arange(branches)[:, None].repeat(1, num_slots)
    block[:, -1] += GUESS
    slot_positions = anchors[:, None] + 1 + torch.arange(num_slots)
    rows = Rows.concatenate(
        Rows.clean(cached + torch.arange(width)),
        Rows(anchors, anchors, torch.full_like(anchors, CLEAN), document),
        Rows(
            slot_positions.flatten(),
            anchors.repeat_interleave(num_slots),
            block.flatten(),
            document.repeat_interleave(num_slots),
        ),
    )[None]
    ids = [*trunk, *(outcome.bonus_token for outcome in outcomes), *[MASKED] * (branches * num_slots)]
    keys = cache_places(rows, torch.tensor([[cached]]), cached + len(ids))
    slots = width + branches + torch.arange(branches * num_slots).view(branches, num_slots)
    own = width + torch.arange(branches)[:, None]
    return PackedLayout(
        token_ids=torch.tensor([ids]),
        rows=rows,
        mask=dense(union(packed_rules(config.block_attention)), rows, keys),
        predicting=torch.cat((own, slots), dim=1) if config.alignment == "next" else slots,
        num_slots=branches * num_slots,
    )
