"""Losses of drafter training."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

HEAD_ROWS = 128
"""Rows of logits that exist at one time where the head is frozen."""


def position_weights(num_slots: int, gamma: float) -> Tensor:
    """exp(-(j - 1) / gamma) for j = 1..num_slots, float32 (DFlash): a rejection ends the block, so early slots weigh most."""
    return torch.exp(-torch.arange(num_slots, dtype=torch.float32) / gamma)


def head_loss(hidden: Tensor, head: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    """Weighted mean cross entropy (nats) of `hidden @ head.T`, a float32 scalar.

    hidden [n, hidden_size], head [vocab, hidden_size], targets int64 [n], weights float32 [n]. Where the head is frozen, logits are
    made, used and dropped a few rows at a time: the whole of them would be the largest tensor of a step.
    """
    weights = weights / weights.sum().clamp(min=1e-9)
    if head.requires_grad:
        return (F.cross_entropy((hidden @ head.T).float(), targets, reduction="none") * weights).sum()
    loss: Tensor = _FrozenHeadLoss.apply(hidden, head, targets, weights)  # type: ignore[no-untyped-call]
    return loss


class _FrozenHeadLoss(torch.autograd.Function):
    """d loss / d logits = weight * (softmax - one_hot), so the gradient of `hidden` is ready with the loss."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, head: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        gradient = torch.empty_like(hidden)
        for start in range(0, len(hidden), HEAD_ROWS):
            rows = slice(start, start + HEAD_ROWS)
            logits = hidden[rows] @ head.T
            log_sum = logits.float().logsumexp(-1) if logits.dtype == torch.float32 else torch.logsumexp(logits, -1).float()
            picked = logits.gather(1, targets[rows, None])[:, 0].float()
            total += ((log_sum - picked) * weights[rows]).sum()
            error = logits.softmax(-1)
            error.scatter_add_(1, targets[rows, None], torch.full_like(error[:, :1], -1.0))
            gradient[rows] = (error @ head) * weights[rows, None].to(hidden.dtype)
        ctx.save_for_backward(gradient)
        return total

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return gradient * grad_outputs[0].to(gradient.dtype), None, None, None
