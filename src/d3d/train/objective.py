"""Training objective of one answer: the loss of the slots of many blocks hung in it, and of its
clean rows if they are trained."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from d3d.model.choice import SEEN_TOKENS
from d3d.model.drafter import DrafterModel
from d3d.train.blocks import clean_pass, hang_blocks, joint_pass, slot_pass
from d3d.train.config import Stage, TrainConfig
from d3d.train.losses import Recorded, Teacher, head_loss, slot_losses, slot_weights
from d3d.train.top_logits import TopLogits

UNTOLD = 6
"""One block in this many is trained without the previous-token head."""

T = TypeVar("T")


class AnswerLoss(NamedTuple):
    loss: Tensor
    """Float32 scalar, nats."""
    slots: int
    """Slots that had a token to predict."""


class TrainingText(NamedTuple):
    """A text to train on."""

    token_ids: Tensor
    """int64 [length]: prompt and answer."""
    first: int
    """Position of the answer's first token."""
    top: TopLogits | None = None
    """The target's best logits at each answer token, if they are the teacher."""


class AnswerObjective(nn.Module):
    """The loss as a module; its `forward` is the whole pass, so that hooks of sharded weights see
    all of it."""

    def __init__(
        self, model: DrafterModel, config: TrainConfig, compute_dtype: torch.dtype | None = None
    ) -> None:
        """compute_dtype: dtype in which full weights (float32) are computed; None if the caller
        casts them."""
        super().__init__()
        self.model, self.config = model, config
        casts = model.config.delta is None and compute_dtype not in (None, torch.float32)
        self._autocast = compute_dtype if casts else None

    def forward(
        self,
        token_ids: Tensor,
        first: int,
        anchors: list[int],
        stage: Stage,
        top: TopLogits | None = None,
    ) -> AnswerLoss:
        """Loss of the blocks at anchors (positions within the answer). token_ids, first, top: as in
        `TrainingText`."""
        with self._computing():
            return self._loss(TrainingText(token_ids, first, top), anchors, stage)

    def within(self, work: Callable[[], T]) -> T:
        """Do work that calls the model outside of `forward`, in the compute dtype."""
        with self._computing():
            return work()

    def _computing(self) -> torch.autocast | nullcontext[None]:
        # no part of `within`: FSDP hooks that method, and must not be entered twice
        if self._autocast is None:
            return nullcontext()
        return torch.autocast(self.model.transformer.device.type, self._autocast)

    def _loss(self, text: TrainingText, anchors: list[int], stage: Stage) -> AnswerLoss:
        model, (token_ids, first, _) = self.model, text
        places = torch.tensor(anchors, device=token_ids.device)
        num_slots = model.config.num_slots(stage.block_size)
        batch = hang_blocks(token_ids, places, num_slots, model.config)
        if model.config.clean_rows_are_base:
            clean, cache = clean_pass(model, token_ids)
            slots = slot_pass(model, cache, batch)
            return self._slots_loss(text, batch.targets, slots, clean, stage)
        clean, slots = joint_pass(model, token_ids, batch)
        loss, count = self._slots_loss(text, batch.targets, slots, None, stage)
        rows = slice(first - 1, len(token_ids) - 1)
        even = torch.ones(len(token_ids) - first, device=token_ids.device)
        ar_loss = head_loss(clean[rows], model.transformer.head.weight, token_ids[first:], even)
        return AnswerLoss(loss + self.config.ar_weight * ar_loss, count)

    def _slots_loss(
        self, text: TrainingText, places: Tensor, slots: Tensor, clean: Tensor | None, stage: Stage
    ) -> AnswerLoss:
        """places: `BlockBatch.targets`; clean: final states of the clean rows if they are the
        target's own, else None."""
        token_ids, weighting = text.token_ids, self.config.weighting
        inside = places < len(token_ids)
        within, keep = places.clamp(max=len(token_ids) - 1), inside.flatten()
        states = _told(self.model, slots, token_ids, within)
        head, targets = self.model.transformer.head.weight, token_ids[within].flatten()
        losses = hits = torch.zeros(inside.shape, device=token_ids.device)
        if weighting != "decay":
            found = slot_losses(states.detach(), head, targets)
            losses, hits = (values.view(inside.shape) for values in found)
        weights = slot_weights(weighting, stage.decay, losses, hits, inside).flatten()
        teacher = self._teacher(text, within.flatten()[keep], clean)
        loss = head_loss(states[keep], head, targets[keep], weights[keep], teacher)
        return AnswerLoss(loss, int(keep.sum()))

    def _teacher(
        self, text: TrainingText, places: Tensor, clean: Tensor | None
    ) -> Teacher | Recorded | None:
        """places: position in the text of each slot's target, int64 [n]."""
        share, top = self.config.distillation, text.top
        if share == 0:
            return None
        if top is not None:
            rows = (places - text.first).to(top.ids.device)
            ids = top.ids[rows].to(places.device, torch.int64)
            return Recorded(ids, top.log_probs[rows].to(places.device).float().softmax(-1), share)
        return None if clean is None else Teacher(clean[places - 1], share)


def _told(model: DrafterModel, slots: Tensor, token_ids: Tensor, targets: Tensor) -> Tensor:
    """States of the slots after the previous-token head has read the tokens before their targets
    (positions in the text, int64 [num_blocks, num_slots]). One block in UNTOLD, by its anchor's
    position, goes without: the head chooses among the tokens that a slot ranks best without it."""
    if model.previous_token_head is None:
        return slots
    seen = torch.stack(
        [token_ids[(targets - 1 - back).clamp(min=0)] for back in range(SEEN_TOKENS)], dim=-1
    )
    told = model.condition(slots, seen.flatten(0, 1)).view(*targets.shape, -1)
    untold = targets[:, 0] % UNTOLD == 0
    return torch.where(untold[:, None, None], slots.view(told.shape), told).flatten(0, 1)
