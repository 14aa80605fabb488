"""Rows of a packed pass: the trunk (missing committed tokens, then the draft under verification),
the branches' anchors, their slots.

Deltas that act at slots only act on a pass's last rows, so the slots stand last.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from d3d.core.types import Outcome
from d3d.drafting.layout import MASKED, pass_mask
from d3d.model.drafter import DrafterConfig
from d3d.model.masks.rules import CLEAN, GUESS, Rows, packed_rules, union


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
    """int64 [branches, draft_length + 1]: the row that predicts each drafted token of each branch,
    and then the token behind them."""
    num_slots: int


def packed_layout(
    config: DrafterConfig,
    cached: int,
    text: list[int],
    draft: Sequence[int],
    outcomes: Sequence[Outcome],
    draft_length: int,
) -> PackedLayout:
    """Lay out a pass that drafts `draft_length` tokens behind every outcome of `draft`, which hangs
    at the last token of `text`.

    cached: tokens of `text` that are in the cache. A branch's last slot is its guess slot: what
    would follow the whole successor."""
    trunk = [*text[cached:], *draft]
    width, branches = len(trunk), len(outcomes)
    num_slots = config.num_slots(draft_length) + 1
    anchors = len(text) + torch.tensor([outcome.num_accepted for outcome in outcomes])
    document = 1 + torch.arange(branches)
    block = torch.arange(branches)[:, None].repeat(1, num_slots)
    block[:, -1] += GUESS
    bonus = torch.tensor([outcome.bonus_token for outcome in outcomes])
    slot_ids = torch.full((branches, num_slots), MASKED)
    slot_positions = anchors[:, None] + 1 + torch.arange(num_slots)
    if config.anchor_slot:
        slot_ids[:, 0] = bonus
        slot_positions -= 1
    own = (
        slice(0, 0) if config.anchor_slot else slice(None)
    )  # branches whose anchor is a row of its own
    rows = Rows.concatenate(
        Rows.clean(cached + torch.arange(width)),
        Rows(anchors, anchors, torch.full_like(anchors, CLEAN), document)[own],
        Rows(
            slot_positions.flatten(),
            anchors.repeat_interleave(num_slots),
            block.flatten(),
            document.repeat_interleave(num_slots),
        ),
    )[None]
    ids = torch.cat((torch.tensor(trunk, dtype=torch.long), bonus[own], slot_ids.flatten()))
    slots = len(ids) - slot_ids.numel() + torch.arange(slot_ids.numel()).view(branches, num_slots)
    anchor_rows = width + torch.arange(branches)[:, None]
    return PackedLayout(
        token_ids=ids[None],
        rows=rows,
        mask=pass_mask(union(packed_rules(config.block_attention)), rows, [cached]),
        predicting=torch.cat((anchor_rows, slots), dim=1) if config.own_rows else slots,
        num_slots=branches * num_slots,
    )
