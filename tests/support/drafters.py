"""Tiny drafters, and what they must draft: one text at a time, without a cache, straight from the definition."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from d3d.core.sequence import Sequence
from d3d.core.types import SamplingParams
from d3d.masks.dense import dense
from d3d.masks.rules import Rows, block_rules, union
from d3d.models.drafter import DeltaConfig, DrafterConfig, DrafterModel
from d3d.models.from_target import from_target
from d3d.models.kv_cache import PassThrough
from d3d.models.linear import Linear
from d3d.models.tiny import tiny_transformer
from d3d.models.transformer import Transformer

EVERY_KIND = [
    {"block_attention": attention, "alignment": alignment}
    for attention, alignment in itertools.product(("causal", "bidirectional"), ("next", "same"))
]
every_kind = pytest.mark.parametrize("kind", EVERY_KIND, ids=lambda kind: f"{kind['block_attention']}-{kind['alignment']}")


def tiny_drafter(base: Transformer | None = None, *, scope: str | None = "slots", trained: bool = True, **config: Any) -> DrafterModel:
    """Two layers, blocks of 6. `scope`: of the deltas; None is full weights. `trained`: the deltas are random and not zero."""
    base = base or tiny_transformer(seed=1)
    delta = None if scope is None else DeltaConfig(rank=4, scope=scope)  # type: ignore[arg-type]
    fields = {"block_size": 6, "kept_layers": tuple(range(len(base.layers))), "delta": delta, **config}
    model = from_target(base, DrafterConfig(**fields))
    if trained:
        generator = torch.Generator().manual_seed(7)
        for module in model.modules():
            if isinstance(module, Linear) and module.up is not None:
                module.up.data = torch.randn(module.up.shape, generator=generator) * 0.25
    return model.eval()


def text(length: int, seed: int = 0) -> list[int]:
    return torch.randint(0, 90, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def sequence(token_ids: list[int]) -> Sequence:
    return Sequence(token_ids, SamplingParams())


@torch.no_grad()
def block_logits(model: DrafterModel, token_ids: list[int], block: list[int]) -> Tensor:
    """Logits of the drafted positions, [len(block), vocab]; `block` has -1 where it is masked."""
    anchor = len(token_ids) - 1
    num_slots = len(block) - (model.config.alignment == "next")
    slots = torch.arange(anchor + 1, anchor + 1 + num_slots)
    clean = Rows.clean(torch.arange(len(token_ids)))
    rows = Rows.concatenate(clean, Rows(slots, torch.full_like(slots, anchor), torch.zeros_like(slots), torch.zeros_like(slots)))
    mask = dense(union(block_rules(model.config.block_attention)), rows, rows)
    x = model.embed(torch.tensor([token_ids + block[:num_slots]]))
    hidden = model.transformer.hidden(x, rows.position[None], mask[None], PassThrough(), model.delta_rows(len(rows.position), num_slots))[0]
    return model.transformer.logits(hidden[-len(block) :])


def reference_draft(model: DrafterModel, token_ids: list[int], length: int, steps: int = 1) -> list[int]:
    """A block, its most confident places first."""
    block = [-1] * length
    for left in range(steps, 0, -1):
        chances = block_logits(model, token_ids, block)
        if model.config.mask_token_id is not None:
            chances[:, model.config.mask_token_id] = float("-inf")
        best = chances.softmax(-1).max(-1)
        open_places = [place for place in range(length) if block[place] < 0]
        share = -(-len(open_places) // left)
        for place in sorted(open_places, key=lambda place: -float(best.values[place]))[:share]:
            block[place] = int(best.indices[place])
    return block
