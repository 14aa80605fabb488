"""What a drafter chooses for each place of a draft, and among which tokens."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Chosen(NamedTuple):
    """The tokens of drafts, and what the drafter gives them; each [n, draft_length]."""

    token_ids: Tensor
    """int64"""
    best: Tensor
    """float32: their logits, the largest of each row; not finite where the drafter is broken."""
    logprobs: Tensor | None
    """float32: log of their probabilities; None where nobody asked."""


class Candidates(NamedTuple):
    """Tokens among which each slot's is chosen when those before it are known; both [n, slots,
    candidates]."""

    token_ids: Tensor
    """int64"""
    scores: Tensor
    """float32, -inf for what can't be drafted."""


FOLDS = 64
"""Rows that `best_few` folds a row of logits into."""


def best_few(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` best tokens of each row of logits [..., tokens], the best first: their logits and
    their int64 indices, [..., count]; fewer where there are fewer. Among equals any may be taken.

    On a CPU a long row is folded: its best tokens lie in the columns that have the best maxima, and
    sorting these alone takes half the time, of 49 thousand tokens."""
    tokens = logits.shape[-1]
    columns = tokens // FOLDS
    if logits.device.type != "cpu" or columns < 4 * count:
        found = logits.topk(min(count, tokens))
        return found.values, found.indices
    folded = logits[..., : columns * FOLDS].unflatten(-1, (FOLDS, columns))
    rest = torch.arange(columns * FOLDS, tokens).expand(*logits.shape[:-1], -1)
    indices = (
        folded.amax(-2).topk(count).indices[..., None, :] + columns * torch.arange(FOLDS)[:, None]
    )
    indices = torch.cat((indices.flatten(-2), rest), dim=-1)
    values, places = logits.gather(-1, indices).topk(count)
    return values, indices.gather(-1, places)


def best_of(logits: Tensor, token_ids: Tensor | None, *, logprobs: bool) -> Chosen:
    """The best token of each row of logits, float32 [n, rows, tokens]; token_ids int64 [tokens] or
    [n, rows, tokens]: whose logits they are, None where they are those of 0, 1, 2, ..."""
    best, index = logits.max(-1)
    chosen = (
        index
        if token_ids is None
        else token_ids.expand(logits.shape).gather(-1, index[..., None])[..., 0]
    )
    return Chosen(chosen, best, best - logits.logsumexp(-1) if logprobs else None)


def joined(first: Chosen, then: Chosen) -> Chosen:
    """Rows of the same drafts, one part behind the other."""
    logprobs = (
        None
        if first.logprobs is None or then.logprobs is None
        else torch.cat((first.logprobs, then.logprobs), dim=1)
    )
    return Chosen(
        torch.cat((first.token_ids, then.token_ids), dim=1),
        torch.cat((first.best, then.best), dim=1),
        logprobs,
    )
