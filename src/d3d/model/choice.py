"""Choice of drafted tokens: the best of each row, or among candidates rescored given the tokens
drafted before."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from d3d.model.linear import linear

SEEN_TOKENS = 2
"""Number of previous tokens that a previous-token head reads."""

CANDIDATES = 64
"""Number of a slot's best tokens that are rescored once the tokens before it are known."""

FOLDS = 64
"""Number of rows that `best_few` folds a row of logits into."""


class Chosen(NamedTuple):
    """Chosen tokens of drafts, and their logits and log-probabilities; each [n, draft_length]."""

    token_ids: Tensor
    """int64"""
    best: Tensor
    """float32: the largest logit of each row; not finite if the drafter is broken."""
    logprobs: Tensor | None
    """float32: their log-probabilities; None if not requested."""


class Candidates(NamedTuple):
    """Tokens to choose from for each slot, given the tokens before it; both [n, slots,
    candidates]."""

    token_ids: Tensor
    """int64"""
    scores: Tensor
    """float32, -inf for tokens that can't be drafted."""


def best_few(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` best tokens of each row of logits [..., tokens], best first: their logits and
    int64 indices, [..., count or tokens]. Ties are broken arbitrarily.

    On a CPU a long row is folded: its best tokens lie in the columns with the best maxima, and
    sorting only these halves the time for 49 thousand tokens."""
    tokens = logits.shape[-1]
    columns = tokens // FOLDS
    if logits.device.type != "cpu" or columns < 4 * count:
        best = logits.topk(min(count, tokens))
        return best.values, best.indices
    folded = logits[..., : columns * FOLDS].unflatten(-1, (FOLDS, columns))
    rest = torch.arange(columns * FOLDS, tokens).expand(*logits.shape[:-1], -1)
    indices = (
        folded.amax(-2).topk(count).indices[..., None, :] + columns * torch.arange(FOLDS)[:, None]
    )
    indices = torch.cat((indices.flatten(-2), rest), dim=-1)
    values, places = logits.gather(-1, indices).topk(count)
    return values, indices.gather(-1, places)


def best_of(logits: Tensor, token_ids: Tensor | None, *, logprobs: bool) -> Chosen:
    """The best token of each row of logits, float32 [n, rows, tokens].

    token_ids int64 [tokens] or [n, rows, tokens]: tokens of the logits; None: 0, 1, 2, ..."""
    best, chosen = logits.max(-1)
    if token_ids is not None:
        chosen = token_ids.expand(logits.shape).gather(-1, chosen[..., None])[..., 0]
    return Chosen(chosen, best, best - logits.logsumexp(-1) if logprobs else None)


def joined(first: Chosen, then: Chosen) -> Chosen:
    """Concatenate the rows of the same drafts."""
    logprobs = None
    if first.logprobs is not None and then.logprobs is not None:
        logprobs = torch.cat((first.logprobs, then.logprobs), dim=1)
    return Chosen(
        torch.cat((first.token_ids, then.token_ids), dim=1),
        torch.cat((first.best, then.best), dim=1),
        logprobs,
    )


class PreviousTokenHead(nn.Module):
    """Conditions a slot's final state on the tokens drafted before it, by a gated low-rank step.

    All slots of a block are computed at once, so none of them sees the tokens chosen for the
    earlier ones. The idea is DSpark's Markov head (arXiv 2607.05147), which is a table of bigram
    logits."""

    matrices = ("of_state", "of_tokens", "up")

    def __init__(self, hidden_size: int, width: int, generator: torch.Generator) -> None:
        """Without training it changes nothing: `up` is zero."""
        super().__init__()

        def random(columns: int) -> nn.Parameter:
            values = torch.randn(width, columns, generator=generator)
            return nn.Parameter(values * hidden_size**-0.5)

        self.of_state = random(hidden_size)
        self.of_tokens = random(SEEN_TOKENS * hidden_size)
        self.up = nn.Parameter(torch.zeros(hidden_size, width))

    def project_states(self, states: Tensor) -> Tensor:
        """Project states [..., hidden_size] to [..., width]; all slots of a block at once."""
        return linear(F.rms_norm(states, states.shape[-1:]), _as(self.of_state, states.dtype))

    @staticmethod
    def embed_context(embeddings: Tensor) -> Tensor:
        """Normalise embeddings [n, tokens, hidden_size] of previous tokens."""
        return F.rms_norm(embeddings, embeddings.shape[-1:])

    def forward(self, states: Tensor, projected: Tensor, context: Tensor) -> Tensor:
        """Conditioned states [n, hidden_size] for the decoder's head, in the dtype of `states`.

        states [n, hidden_size]; projected [n, width]: their `project_states`; context [n,
        SEEN_TOKENS, hidden_size]: `embed_context` of the previous tokens, the nearest first."""
        dtype = states.dtype
        inner = projected + linear(context.flatten(1), _as(self.of_tokens, dtype))
        return states + linear(F.silu(inner), _as(self.up, dtype))


def _as(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """The weight in the dtype of the computation, which packed weights have already."""
    return weight if weight.dtype is dtype else weight.to(dtype)
