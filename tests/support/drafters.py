"""Tiny drafters, and what they must draft: one text at a time, without a cache, straight from the
definition."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from d3d.engine.request import Request
from d3d.engine.sampling import SamplingParams
from d3d.model.drafter import DeltaConfig, DrafterConfig, DrafterModel
from d3d.model.from_target import from_target
from d3d.model.kv_cache import PassThrough
from d3d.model.linear import Linear
from d3d.model.masks.dense import dense
from d3d.model.masks.rules import Rows, block_rules, union
from d3d.model.transformer import Transformer
from support.tiny import tiny_transformer

STARTS: dict[str, dict[str, Any]] = {
    "next": {"alignment": "next"},
    "same": {"alignment": "same"},
    "anchor-slot": {"alignment": "next", "anchor_slot": True},
}
"""How a block begins."""

KINDS = {
    f"{attention}-{name}": {"block_attention": attention, **start}
    for attention, (name, start) in itertools.product(("causal", "bidirectional"), STARTS.items())
}
EVERY_KIND = list(KINDS.values())
every_kind = pytest.mark.parametrize("kind", EVERY_KIND, ids=list(KINDS))


def tiny_drafter(
    base: Transformer | None = None,
    *,
    scope: str | None = "slots",
    trained: bool = True,
    **config: Any,
) -> DrafterModel:
    """Two layers, blocks of 6. `scope`: of the deltas; None is full weights. `trained`: the deltas
    are random and not zero."""
    base = base or tiny_transformer(seed=1)
    delta = None if scope is None else DeltaConfig(rank=4, scope=scope)  # type: ignore[arg-type]
    fields = {
        "block_size": 6,
        "kept_layers": tuple(range(len(base.layers))),
        "delta": delta,
        **config,
    }
    model = from_target(base, DrafterConfig(**fields))
    if trained:
        generator = torch.Generator().manual_seed(7)
        for module in model.modules():
            if isinstance(module, Linear) and module.up is not None:
                module.up.data = torch.randn(module.up.shape, generator=generator) * 0.25
    return model.eval()


def text(length: int, seed: int = 0) -> list[int]:
    return torch.randint(0, 90, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def request(token_ids: list[int], room: int | None = None) -> Request:
    """room: most tokens that a drafter may propose for it."""
    return Request(token_ids, None if room is None else SamplingParams(max_tokens=room + 1))


def grow(request: Request, token_ids: Sequence[int]) -> None:
    """Extend the answer, whatever would end it; the room for drafts stays."""
    request.token_ids.extend(token_ids)
    if request.counts is not None:
        request.counts.add(token_ids)


@torch.no_grad()
def block_logits(model: DrafterModel, token_ids: list[int], block: list[int]) -> Tensor:
    """Logits of the drafted positions, [len(block), vocab]; `block` has -1 where it is masked."""
    num_clean = len(token_ids) - model.config.anchor_slot
    own_rows = model.config.alignment == "next" and not model.config.anchor_slot
    num_slots = len(block) - own_rows
    slots = torch.arange(num_clean, num_clean + num_slots)
    clean = Rows.clean(torch.arange(num_clean))
    last_seen = torch.full_like(slots, num_clean - 1)
    rows = Rows.concatenate(
        clean, Rows(slots, last_seen, torch.zeros_like(slots), torch.zeros_like(slots))
    )
    mask = dense(union(block_rules(model.config.block_attention)), rows, rows)
    x = model.embed(torch.tensor([(token_ids + block)[: len(rows.position)]]))
    slot_layers = model.config.slot_layers or model.config.kept_layers
    hidden = _through_layers(model, x, rows, mask, slot_layers, num_slots)[0]
    return model.transformer.logits(hidden[-len(block) :])


def _through_layers(
    model: DrafterModel,
    x: Tensor,
    rows: Rows,
    mask: Tensor,
    slot_layers: tuple[int, ...],
    num_slots: int,
) -> Tensor:
    """All rows through all layers; where slots pass one by, what it made of them is dropped (clean
    rows do not see them)."""
    decoder = model.transformer
    rotary = decoder.rotary(rows.position[None], x.dtype)
    for index, (number, layer) in enumerate(
        zip(model.config.kept_layers, decoder.layers, strict=True)
    ):
        out = layer(
            x, rotary, mask[None], PassThrough(), index, model.delta_rows(x.shape[1], num_slots)
        )
        x = (
            out
            if number in slot_layers
            else torch.cat(
                (out[:, : x.shape[1] - num_slots], x[:, x.shape[1] - num_slots :]), dim=1
            )
        )
    normed: Tensor = decoder.norm(x)
    return normed


def reference_draft(
    model: DrafterModel, token_ids: list[int], length: int, steps: int = 1
) -> list[int]:
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
