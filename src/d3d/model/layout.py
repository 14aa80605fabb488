"""Rows of a drafter pass: clean rows, then groups of slots. All methods share this layout.

Clean rows are the trunk (tokens missing from the cache, and perhaps a draft under verification)
and, in a packed pass, one anchor for each branch. Slots come last, since deltas of scope `slots`
act on a pass's last rows; shorter sequences of a batch are padded before and after them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from d3d.model.masks.dense import dense
from d3d.model.masks.rules import (
    CLEAN,
    GUESS,
    NOWHERE,
    TRUNK,
    BlockAttention,
    Rows,
    Rule,
    block_rules,
    packed_rules,
    union,
)

MASKED = -1
"""Token id of an undrafted position."""

PADDING = 1 << 30
"""Block number of slots that only pad a batch; no row sees them."""


class SlotGroup(NamedTuple):
    """The slots of one block."""

    anchor: int
    """Position of the last clean token they see; for a branch, of its anchor."""
    first: int
    """Position of the first slot; the others follow it."""
    token_ids: Sequence[int]
    """Token id of each slot; MASKED if not drafted yet."""
    branch: int = TRUNK
    """Branch number from 1, or TRUNK."""
    has_guess: bool = False
    """True if the last slot is a guess slot, which sees its block and is seen by no row."""


class BranchAnchor(NamedTuple):
    """Guessed bonus token with a clean row of its own; branches are numbered from 1."""

    position: int
    token_id: int


class PassLayout(NamedTuple):
    """Tensors of one pass over `batch` sequences; keys are cache places, this pass's rows last."""

    token_ids: Tensor
    """int64 [batch, rows], MASKED at masked slots."""
    rows: Rows
    """Fields int64 [batch, rows], from which the mask is built."""
    mask: Tensor
    """bool [batch, rows, keys]."""
    width: int
    """Clean rows, padding included; the slots follow."""
    num_slots: int
    """Slots of each sequence, padding included."""


def lay_out(
    attention: BlockAttention,
    cached: Sequence[int],
    trunks: Sequence[list[int]],
    groups: Sequence[Sequence[SlotGroup]],
    branches: Sequence[Sequence[BranchAnchor]] = (),
) -> PassLayout:
    """Lay out a pass.

    cached[b]: number of clean tokens of sequence b in the cache; trunks[b]: clean tokens that
    follow them; groups[b]: its slots; branches[b]: anchors of its branches."""
    anchors = branches or [()] * len(trunks)
    width = max(len(trunk) + len(branch) for trunk, branch in zip(trunks, anchors, strict=True))
    num_slots = max(sum(len(group.token_ids) for group in each) for each in groups)
    table = [
        _clean_rows(start, trunk, branch, width) + _slot_rows(start, each, num_slots)
        for start, trunk, branch, each in zip(cached, trunks, anchors, groups, strict=True)
    ]
    fields = torch.tensor(table, dtype=torch.long).view(len(table), width + num_slots, 5)
    token_ids, *row_fields = fields.unbind(-1)
    rows = Rows(*row_fields)
    is_packed = any(anchors) or any(
        group.has_guess or group.branch != TRUNK for each in groups for group in each
    )
    rule = union(packed_rules(attention) if is_packed else block_rules(attention))
    return PassLayout(token_ids, rows, pass_mask(rule, rows, list(cached)), width, num_slots)


_Row = tuple[int, int, int, int, int]
"""Token id, position, anchor, block, document: see `Rows`."""


def _clean_rows(
    start: int, trunk: list[int], branches: Sequence[BranchAnchor], width: int
) -> list[_Row]:
    rows = [(token, at, at, CLEAN, TRUNK) for at, token in enumerate(trunk, start)]
    rows += [
        (branch.token_id, branch.position, branch.position, CLEAN, k)
        for k, branch in enumerate(branches, 1)
    ]
    # padding follows the last clean token, so no real row sees it
    end = start + len(trunk)
    return rows + [(0, end + i, end + i, CLEAN, TRUNK) for i in range(width - len(rows))]


def _slot_rows(start: int, groups: Sequence[SlotGroup], num_slots: int) -> list[_Row]:
    rows = []
    for block, group in enumerate(groups):
        last = len(group.token_ids) - 1 if group.has_guess else -1
        rows += [
            (
                token,
                group.first + depth,
                group.anchor,
                block + GUESS if depth == last else block,
                group.branch,
            )
            for depth, token in enumerate(group.token_ids)
        ]
    return rows + [(MASKED, start, start, PADDING, TRUNK)] * (num_slots - len(rows))


def pass_mask(rule: Rule, rows: Rows, cached: list[int]) -> Tensor:
    """Visibility in a pass over `rows` (fields [batch, rows]): bool [batch, rows, keys]. cached:
    clean tokens of each sequence in the cache. Every row must see all cached tokens of its
    sequence, whatever the rule: all passes rely on that."""
    if min(cached) < max(cached):
        num_keys = max(cached) + rows.position.shape[1]
        return dense(rule, rows, cache_places(rows, torch.tensor(cached)[:, None], num_keys))
    among_rows = dense(rule, rows, rows)
    return torch.cat((among_rows.new_ones(*among_rows.shape[:2], cached[0]), among_rows), dim=-1)


def cache_places(rows: Rows, lengths: Tensor, num_keys: int) -> Rows:
    """Contents of each sequence's cache places during the pass: cached clean tokens, then the
    pass's rows, then nothing."""
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
