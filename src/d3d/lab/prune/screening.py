"""The loss of a drafter's slots on a few recorded answers: a quick measure of a layer's worth."""

from __future__ import annotations

import random
from typing import NamedTuple

import torch
from torch import Tensor

from d3d.engine.metrics import ratio
from d3d.model.drafter import DrafterModel
from d3d.model.kv_cache import Window
from d3d.train.blocks import BlockBatch, clean_pass, hang_blocks, joint_pass, slot_pass
from d3d.train.config import Stage
from d3d.train.corpus import Sample
from d3d.train.losses import slot_losses, slot_weights
from d3d.train.trainer import draw_anchors, shortest_answer

DECAY = 4.0
"""Slots over which a slot's weight falls by e: early ones decide how much is kept."""


class _Text(NamedTuple):
    token_ids: Tensor
    batch: BlockBatch
    cache: Window | None
    """Cache of the clean text, if its rows are the base model's, which no removal changes."""


class SlotLoss:
    """The loss of blocks hung at fixed places of fixed answers."""

    @torch.inference_mode()
    def __init__(
        self,
        model: DrafterModel,
        samples: list[Sample],
        *,
        draft_length: int,
        anchors: int,
        max_length: int,
        seed: int,
    ) -> None:
        """samples: those whose answers are too short for a block are left out. max_length: tokens
        of a text that are read."""
        rng = random.Random(seed)
        num_slots = max(1, model.config.num_slots(draft_length))
        shortest = shortest_answer(model.config)
        stage = Stage(share=1.0, block_size=max(2, draft_length), anchors=anchors)
        self._texts = []
        device = model.transformer.device
        for sample in samples:
            room = min(len(sample.token_ids), max_length) - len(sample.prompt_ids)
            if room < shortest or not sample.prompt_ids:
                continue
            token_ids = torch.tensor(sample.token_ids[:max_length], device=device)
            places = torch.tensor(
                draw_anchors(sample, stage, max_length, rng, shortest), device=device
            )
            cache = clean_pass(model, token_ids)[1] if model.config.clean_rows_are_base else None
            batch = hang_blocks(token_ids, places, num_slots, model.config)
            self._texts.append(_Text(token_ids, batch, cache))

    @torch.inference_mode()
    def loss(self, model: DrafterModel) -> float:
        """Mean cross entropy of the slots (nats); early ones weigh most."""
        summed = weighed = 0.0
        for text in self._texts:
            batch = text.batch
            states = (
                joint_pass(model, text.token_ids, batch)[1]
                if text.cache is None
                else slot_pass(model, text.cache, batch)
            )
            inside = batch.targets < len(text.token_ids)
            targets = text.token_ids[batch.targets.clamp(max=len(text.token_ids) - 1)]
            losses, hits = (
                values.view(inside.shape)
                for values in slot_losses(states, model.transformer.head.weight, targets.flatten())
            )
            weights = slot_weights("decay", DECAY, losses, hits, inside)
            summed += float((losses * weights).sum())
            weighed += float(weights.sum())
        return ratio(summed, weighed)
