"""What one answer teaches: the loss of the slots of many blocks hung in it, and of its clean rows
where they learn too."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from d3d.model.choice import SEEN_TOKENS
from d3d.model.drafter import DrafterModel
from d3d.train.blocks import BlockBatch, clean_pass, hang_blocks, joint_pass, slot_pass
from d3d.train.config import Stage, TrainConfig
from d3d.train.losses import Recorded, Teacher, head_loss, slot_losses, slot_weights
from d3d.train.top_logits import TopLogits

UNTOLD = 6
"""One block in so many learns without the previous-token head."""

T = TypeVar("T")


class AnswerLoss(NamedTuple):
    loss: Tensor
    """Float32 scalar, nats."""
    slots: int
    """Slots that had a token to predict."""


class AnswerObjective(nn.Module):
    """The loss as a module whose `forward` holds the whole pass, so that hooks around it (sharded
    weights) see all of it."""

    def __init__(
        self, model: DrafterModel, config: TrainConfig, compute_dtype: torch.dtype | None = None
    ) -> None:
        """compute_dtype: what full weights, which are float32, are computed in; None leaves that to
        who casts them."""
        super().__init__()
        self.model = model
        self.config = config
        self._autocast = (
            compute_dtype
            if model.config.delta is None and compute_dtype not in (None, torch.float32)
            else None
        )

    def forward(
        self,
        token_ids: Tensor,
        first: int,
        anchors: list[int],
        stage: Stage,
        top: TopLogits | None = None,
    ) -> AnswerLoss:
        """As `answer_loss`."""
        with self._computing():
            return answer_loss(
                self.model, Answer(token_ids, first, top), anchors, stage, self.config
            )

    def within(self, work: Callable[[], T]) -> T:
        """Do work that calls the model; a way in beside `forward`."""
        with self._computing():
            return work()

    def _computing(self) -> torch.autocast | nullcontext[None]:
        return (
            nullcontext()
            if self._autocast is None
            else torch.autocast(self.model.transformer.device.type, self._autocast)
        )


class Answer(NamedTuple):
    """A text to learn from."""

    token_ids: Tensor
    """int64 [length]: prompt and answer."""
    first: int
    """Where the answer begins."""
    top: TopLogits | None = None
    """The target's best logits at each answer token, where they are to be learnt."""


def answer_loss(
    model: DrafterModel, answer: Answer, anchors: list[int], stage: Stage, config: TrainConfig
) -> AnswerLoss:
    """anchors: positions within the answer."""
    token_ids, first = answer.token_ids, answer.first
    num_slots = model.config.num_slots(stage.block_size)
    batch = hang_blocks(
        token_ids, torch.tensor(anchors, device=token_ids.device), num_slots, model.config
    )
    if model.config.clean_rows_are_base:
        clean, cache = clean_pass(model, token_ids)
        return _slots_loss(
            model, answer, batch, slot_pass(model, cache, batch), clean, stage, config
        )
    clean, slots = joint_pass(model, token_ids, batch)
    loss, count = _slots_loss(model, answer, batch, slots, None, stage, config)
    rows = slice(first - 1, len(token_ids) - 1)
    even = torch.ones(len(token_ids) - first, device=token_ids.device)
    ar_loss = head_loss(clean[rows], model.transformer.head.weight, token_ids[first:], even)
    return AnswerLoss(loss + config.ar_weight * ar_loss, count)


def _slots_loss(
    model: DrafterModel,
    answer: Answer,
    batch: BlockBatch,
    slots: Tensor,
    clean: Tensor | None,
    stage: Stage,
    config: TrainConfig,
) -> AnswerLoss:
    """`clean`: final states of the clean rows where these are the target's own, else None."""
    token_ids = answer.token_ids
    inside = batch.targets < len(token_ids)
    within = batch.targets.clamp(max=len(token_ids) - 1)
    keep = inside.flatten()
    states = _told(model, slots, token_ids, within)
    head, targets = model.transformer.head.weight, token_ids[within].flatten()
    if config.weighting == "decay":  # needs no look at how the slots do
        losses = hits = torch.zeros(inside.shape, device=token_ids.device)
    else:
        losses, hits = (
            values.view(inside.shape) for values in slot_losses(states.detach(), head, targets)
        )
    weights = slot_weights(config.weighting, stage.decay, losses, hits, inside).flatten()
    teacher = _teacher(answer, within.flatten()[keep], clean, config)
    return AnswerLoss(
        head_loss(states[keep], head, targets[keep], weights[keep], teacher), int(keep.sum())
    )


def _told(model: DrafterModel, slots: Tensor, token_ids: Tensor, targets: Tensor) -> Tensor:
    """The slots' states, told the tokens before their targets (int64 [num_blocks, num_slots],
    places in the text) by the previous-token head. One block in UNTOLD is not, by the place of its
    anchor: the tokens among which the head chooses are those that a slot finds best without being
    told."""
    if model.previous_token_head is None:
        return slots
    seen = torch.stack(
        [token_ids[(targets - 1 - back).clamp(min=0)] for back in range(SEEN_TOKENS)], dim=-1
    )
    told = model.condition(slots, seen.flatten(0, 1)).view(*targets.shape, -1)
    untold = targets[:, 0] % UNTOLD == 0
    return torch.where(untold[:, None, None], slots.view(told.shape), told).flatten(0, 1)


def _teacher(
    answer: Answer, places: Tensor, clean: Tensor | None, config: TrainConfig
) -> Teacher | Recorded | None:
    """places int64 [n]: index in the text of the token that each slot predicts."""
    if config.distillation == 0:
        return None
    if answer.top is not None:
        rows = (places - answer.first).to(answer.top.ids.device)
        ids = answer.top.ids[rows].to(places.device, torch.int64)
        return Recorded(
            ids,
            answer.top.log_probs[rows].to(places.device).float().softmax(-1),
            config.distillation,
        )
    return None if clean is None else Teacher(clean[places - 1], config.distillation)
