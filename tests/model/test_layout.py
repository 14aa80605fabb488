"""Masks of the passes that draft, made from the pass's own rows, against those that look at every
cache place."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from d3d.methods.async_.outcomes import Outcome
from d3d.methods.fused.engine import fused_layout
from d3d.model.drafter import DrafterConfig
from d3d.model.masks.dense import dense
from d3d.model.masks.rules import Rows, Rule

CONFIGS = [
    DrafterConfig(block_size=6, kept_layers=(0, 1), block_attention="causal"),
    DrafterConfig(
        block_size=6, kept_layers=(0, 1), block_attention="bidirectional", alignment="same"
    ),
    DrafterConfig(block_size=6, kept_layers=(0, 1), anchor_slot=True),
]


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The masks that were made, each compared."""
    made = []
    quick = layout.pass_mask

    def both(rule: Rule, rows: Rows, cached: list[int]) -> Tensor:
        mask = quick(rule, rows, cached)
        keys = layout.cache_places(
            rows, torch.tensor(cached)[:, None], max(cached) + rows.position.shape[1]
        )
        assert torch.equal(mask, dense(rule, rows, keys).expand_as(mask))
        made.append(mask)
        return mask

    for module in (layout, fused_layout, packed_layout):
        monkeypatch.setattr(module, "pass_mask", both)
    return made


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("cached", [[3], [0], [3, 3]])
def test_rows_that_see_all_of_the_cache_need_not_look_at_it(
    config: DrafterConfig, cached: list[int], compared: list[Tensor]
) -> None:
    batch = len(cached)
    known = [list(range(10, 15 + sequence)) for sequence in range(batch)]
    layout.draft_layout(config, cached, known, torch.full((batch, 4), layout.MASKED))
    clean = [[20, *range(30, 32 - sequence)] for sequence in range(batch)]
    fused_layout.fused_layout(
        config, cached, clean, [(2, 0, 1)[: 3 - sequence] for sequence in range(batch)]
    )
    packed_layout.packed_layout(
        config, cached[0], known[0], [7, 8, 9], [Outcome(3, 4), Outcome(0, 5), Outcome(0, 6)], 4
    )
    assert [mask.shape[0] for mask in compared] == [batch, batch, 1]
