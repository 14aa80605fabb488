"""Rows of a packed pass: the trunk (missing committed tokens, then the draft under verification),
the branches' anchors, their slots. Several sequences share a pass side by side, without padding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from d3d.methods.async_.outcomes import Outcome
from d3d.model.drafter import DrafterConfig, DrafterModel
from d3d.model.kv_cache import Share, SideBySide, Window
from d3d.model.layout import MASKED, BranchAnchor, PassLayout, SlotGroup, lay_out


class PackedRows(NamedTuple):
    """One sequence's rows of a packed pass."""

    layout: PassLayout
    """Layout of batch 1."""
    predicting: Tensor
    """int64 [branches, draft_length + 1]: the row that predicts each drafted token of each branch,
    and the token after them."""

    @property
    def num_rows(self) -> int:
        return self.layout.token_ids.shape[1]


def packed_rows(
    config: DrafterConfig,
    cached: int,
    text: list[int],
    draft: Sequence[int],
    outcomes: Sequence[Outcome],
    draft_length: int,
) -> PackedRows:
    """Lay out a pass that drafts `draft_length` tokens after each outcome of `draft`, which follows
    `text`.

    cached: tokens of `text` in the cache. Each branch has one more slot, the guess slot, which
    predicts the token after the whole successor."""
    trunk = [*text[cached:], *draft]
    num_slots = config.num_slots(draft_length) + 1
    branches, groups = [], []
    for number, outcome in enumerate(outcomes, 1):
        position = len(text) + outcome.num_accepted
        slots = [MASKED] * num_slots
        if config.anchor_slot:
            slots[0] = outcome.bonus_token
        else:
            branches.append(BranchAnchor(position, outcome.bonus_token))
        first = position if config.anchor_slot else position + 1
        groups.append(SlotGroup(position, first, slots, number, has_guess=True))
    layout = lay_out(config.block_attention, [cached], [trunk], [groups], [branches])
    slot_rows = layout.width + torch.arange(len(outcomes) * num_slots).view(-1, num_slots)
    if config.own_rows:
        anchor_rows = len(trunk) + torch.arange(len(outcomes))[:, None]
        return PackedRows(layout, torch.cat((anchor_rows, slot_rows), dim=1))
    return PackedRows(layout, slot_rows)


def run_side_by_side(
    model: DrafterModel, parts: Sequence[PackedRows], windows: Sequence[Window]
) -> list[Tensor]:
    """Run one pass over several sequences, each with a window of its own. For each part the states
    that predict, [branches, draft_length + 1, hidden_size].

    All clean rows come first, then all slots, as in a pass alone. The caller advances the windows
    by the rows that are to stay."""
    device = model.transformer.device
    layouts = [part.layout for part in parts]
    if len(parts) == 1:
        (layout,), (window,) = layouts, windows
        hidden = model.hidden(
            layout.token_ids, layout.rows.position, layout.mask, window, layout.num_slots
        )
        return [hidden[0, parts[0].predicting.to(device)]]
    num_clean = [layout.width for layout in layouts]
    places = _places(num_clean, [layout.num_slots for layout in layouts])
    shares = [
        Share(window, rows.to(device), count, layout.mask.to(device))
        for window, rows, count, layout in zip(windows, places, num_clean, layouts, strict=True)
    ]
    order = torch.cat(places).argsort()
    token_ids = torch.cat([layout.token_ids[0] for layout in layouts])[order]
    positions = torch.cat([layout.rows.position[0] for layout in layouts])[order]
    num_slots = len(order) - sum(num_clean)
    hidden = model.hidden(token_ids[None], positions[None], None, SideBySide(shares), num_slots)
    return [
        hidden[0, rows[part.predicting].to(device)]
        for rows, part in zip(places, parts, strict=True)
    ]


def _places(num_clean: list[int], num_slots: list[int]) -> list[Tensor]:
    """int64 [clean rows + slots] for each sequence: its rows' indices in the shared pass."""
    clean = torch.arange(sum(num_clean)).split(num_clean)
    slots = (sum(num_clean) + torch.arange(sum(num_slots))).split(num_slots)
    return [torch.cat(pair) for pair in zip(clean, slots, strict=True)]
