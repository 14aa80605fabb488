"""Losses of drafter training: cross entropy over the target's head, and the weights of a block's
slots."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

HEAD_ROWS = 128
"""Rows of logits that exist at one time if the head is frozen."""

Weighting = Literal["decay", "dpace", "first_failure"]


def slot_weights(
    weighting: Weighting, decay: float, losses: Tensor, hits: Tensor, inside: Tensor
) -> Tensor:
    """Weight of each slot, float32 [blocks, slots]. A rejection ends a block, so early slots weigh
    most.

    losses: cross entropy of each slot, float32 [blocks, slots]; hits: whether its best token is
    right, bool; inside: whether it has a token to predict, bool (if not, it weighs nothing).

    decay: exp(-(j - 1) / decay) for slot j (DFlash). dpace: w_j = sum over m >= j of prod over i <=
    m of (s_i + 1) / 2, s the probability of the right token (D-PACE, arXiv 2605.18810, alpha 0.5).
    first_failure: 1 up to and including the first slot whose best token is wrong, 0 after it
    (Spec-AUF, arXiv 2607.01893)."""
    if weighting == "decay":
        slots = torch.arange(losses.shape[1], dtype=torch.float32, device=losses.device)
        return torch.exp(-slots / decay) * inside
    if weighting == "dpace":
        survival = (0.5 * torch.exp(-losses) + 0.5).cumprod(1) * inside
        return survival.flip(1).cumsum(1).flip(1) * inside
    reached = hits.to(torch.float32).cumprod(1)
    return torch.cat((torch.ones_like(reached[:, :1]), reached[:, :-1]), dim=1) * inside


@torch.no_grad()
def slot_losses(hidden: Tensor, head: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """hidden [n, hidden_size], head [vocab_size, hidden_size], targets int64 [n] -> cross entropy
    (nats, float32 [n]) and whether the best token is right (bool [n]), without gradients."""
    losses, hits = [], []
    for start in range(0, len(hidden), HEAD_ROWS):
        rows = slice(start, start + HEAD_ROWS)
        logits = hidden[rows] @ head.T
        right = logits.gather(1, targets[rows, None])[:, 0]
        losses.append(logits.logsumexp(-1).float() - right.float())
        hits.append(logits.argmax(-1) == targets[rows])
    return torch.cat(losses), torch.cat(hits)


class Teacher(NamedTuple):
    """Soft labels: the target's own distribution at each slot's token."""

    hidden: Tensor
    """Final states of the clean rows that predict the same tokens, [n, hidden_size], without
    gradients."""
    share: float
    """Share of the soft label; the rest is the token itself."""

    def soft(self, rows: slice, head: Tensor) -> Tensor:
        """[rows, vocab_size], summing to 1."""
        return (self.hidden[rows] @ head.T).softmax(-1)


class Recorded(NamedTuple):
    """Soft labels over the target's best tokens only, as recorded by `d3d data --top-logits`."""

    ids: Tensor
    """int64 [n, k]."""
    probabilities: Tensor
    """float32 [n, k], each row summing to 1."""
    share: float

    def soft(self, rows: slice, head: Tensor) -> Tensor:
        out = torch.zeros(len(self.ids[rows]), len(head), dtype=head.dtype, device=head.device)
        return out.scatter_(1, self.ids[rows], self.probabilities[rows].to(head.dtype))


def head_loss(
    hidden: Tensor,
    head: Tensor,
    targets: Tensor,
    weights: Tensor,
    teacher: Teacher | Recorded | None = None,
) -> Tensor:
    """Weighted mean cross entropy (nats), a float32 scalar.

    hidden [n, hidden_size], head [vocab_size, hidden_size], targets int64 [n], weights float32 [n].
    With a frozen head, logits exist for a few rows at a time, since all of them would be a step's
    largest tensor. A `Teacher` uses this head, so it must be frozen."""
    weights = weights / weights.sum().clamp(min=1e-9)
    if head.requires_grad:
        if isinstance(teacher, Teacher):
            raise ValueError("a head that is trained can't be its own teacher")
        logits = (hidden @ head.T).float()
        losses = F.cross_entropy(logits, targets, reduction="none")
        if teacher is not None:
            expected = (logits.gather(1, teacher.ids) * teacher.probabilities).sum(-1)
            soft = logits.logsumexp(-1) - expected
            losses = (1 - teacher.share) * losses + teacher.share * soft
        return (losses * weights).sum()
    loss: Tensor = _FrozenHeadLoss.apply(hidden, targets, weights, teacher, head)  # type: ignore[no-untyped-call]
    return loss


class _FrozenHeadLoss(torch.autograd.Function):
    """Computes loss and gradient together: d loss / d logits = weight * (softmax - label)."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        targets: Tensor,
        weights: Tensor,
        teacher: Teacher | Recorded | None,
        head: Tensor,
    ) -> Tensor:
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        of_hidden = torch.empty_like(hidden)
        for start in range(0, len(hidden), HEAD_ROWS):
            rows = slice(start, start + HEAD_ROWS)
            logits = hidden[rows] @ head.T
            soft = None if teacher is None else (teacher.soft(rows, head), teacher.share)
            losses, error = _error(logits, targets[rows], soft)
            total += (losses * weights[rows]).sum()
            error *= weights[rows, None].to(error.dtype)
            of_hidden[rows] = error @ head
        ctx.save_for_backward(of_hidden)
        return total

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (of_hidden,) = ctx.saved_tensors
        return of_hidden * grad_outputs[0].to(of_hidden.dtype), None, None, None, None


def _error(
    logits: Tensor, targets: Tensor, teacher: tuple[Tensor, float] | None
) -> tuple[Tensor, Tensor]:
    """Cross entropy of each row (float32 [n]), and softmax - label ([n, vocab_size], dtype of the
    logits). teacher: the soft label, shaped as the logits, and its share."""
    log_sum = logits.logsumexp(-1).float()
    label_score = logits.gather(1, targets[:, None])[:, 0].float()
    error, share = logits.softmax(-1), 1.0
    if teacher is not None:
        soft, share = teacher[0], 1.0 - teacher[1]
        label_score = share * label_score + teacher[1] * (soft.float() * logits.float()).sum(-1)
        error -= teacher[1] * soft
    error.scatter_add_(1, targets[:, None], torch.full_like(error[:, :1], -share))
    return log_sum - label_score, error
