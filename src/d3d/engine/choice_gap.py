"""Margin between a target's choice and another token."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from d3d.engine.noise import uniform
from d3d.engine.sampling import inverse_cdf, keep_likely, processed_logits

if TYPE_CHECKING:
    from d3d.engine.request import Request


def choice_gap(logits: Tensor, request: Request, other: int | None = None) -> float:
    """Distance of the target's choice after `request` from `other` (None: from any other token);
    tells rounding errors from mistakes.

    logits: float32 [vocab_size] or [1, vocab_size]. Greedy: best processed logit minus the other's,
    relative to max(1, |best|). Sampling: distance of the uniform number to the other's interval in
    the cumulative distribution (None: to the nearer end of the chosen token's interval); shifts of
    a top-k, top-p or min-p cutoff by rounding are ignored. 0 if `other` is the choice, infinite if
    it is impossible."""
    params = request.params
    scores = processed_logits(logits.reshape(1, -1), [()], request)
    if params.greedy:
        best, second = scores.topk(2).values[0].tolist()
        return float(
            (best - (second if other is None else float(scores[0, other]))) / max(1.0, abs(best))
        )
    probabilities = keep_likely(scores, params).softmax(dim=-1)
    point = uniform(request.seed, len(request))
    (token_id,) = inverse_cdf(probabilities, [point])
    if token_id == other:
        return 0.0
    if other is not None and float(probabilities[0, other]) == 0.0:
        return math.inf
    cumulative = probabilities[0].cumsum(0, dtype=torch.float64)
    cumulative = cumulative / cumulative[-1]
    lower, upper = _interval(cumulative, token_id if other is None else other)
    return min(abs(point - lower), abs(upper - point))


def _interval(cumulative: Tensor, token_id: int) -> tuple[float, float]:
    return float(cumulative[token_id - 1]) if token_id else 0.0, float(cumulative[token_id])
