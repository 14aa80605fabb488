"""Masks as boolean tensors, and the element-wise loop that they must equal."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from d3d.model.masks.rules import Rows, Rule


def dense(rule: Rule, query: Rows, key: Rows) -> Tensor:
    """query fields [..., rows], key fields [..., keys] -> bool [..., rows, keys], True =
    visible."""
    return rule(query[..., :, None], key[..., None, :])


def elementwise(rule: Rule, query: Rows, key: Rows) -> Tensor:
    """Reference for `dense`: one pair at a time, for one-dimensional fields."""
    rows, keys = query.position.shape[0], key.position.shape[0]
    return torch.tensor(
        [[bool(rule(query[i], key[j])) for j in range(keys)] for i in range(rows)]
    ).reshape(rows, keys)


def tree(parents: Sequence[int], device: torch.device) -> Tensor:
    """Mask among the rows of an anchor and a draft tree: bool [1 + nodes, 1 + nodes]. Each row sees
    itself and its ancestors; parents: index of each node's parent, -1 for the anchor."""
    seen = torch.eye(len(parents) + 1, dtype=torch.bool)
    for row, parent in enumerate(parents, 1):
        seen[row] |= seen[parent + 1]
    return seen.to(device)


def causal(starts: Tensor, rows: int, keys: int) -> Tensor:
    """Plain causal mask of a pass over cache places 0..keys-1: bool [batch, rows, keys]. Row i of
    sequence b stands at `starts[b] + i`."""
    positions = starts[:, None] + torch.arange(rows, device=starts.device)
    return torch.arange(keys, device=starts.device) <= positions[:, :, None]
