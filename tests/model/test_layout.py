"""Masks of the passes that draft, made from the pass's own rows, against those that look at every
cache place."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from d3d.methods.async_.outcomes import Outcome
from d3d.methods.async_.packed_layout import packed_rows
from d3d.methods.fused.engine import fused_layout
from d3d.methods.serial.denoise import draft_layout
from d3d.model import layout
from d3d.model.drafter import DrafterConfig
from d3d.model.layout import MASKED, SlotGroup, lay_out
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

    monkeypatch.setattr(layout, "pass_mask", both)
    return made


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("cached", [[3], [0], [3, 3], [3, 2], [0, 4]])
def test_rows_that_see_all_of_the_cache_need_not_look_at_it(
    config: DrafterConfig, cached: list[int], compared: list[Tensor]
) -> None:
    batch = len(cached)
    known = [list(range(10, 15 + sequence)) for sequence in range(batch)]
    draft_layout(config, cached, known, [[MASKED] * 4] * batch)
    clean = [[20, *range(30, 32 - sequence)] for sequence in range(batch)]
    fused_layout(config, cached, clean, [(2, 0, 1)[: 3 - sequence] for sequence in range(batch)])
    outcomes = [Outcome(3, 4), Outcome(0, 5), Outcome(0, 6)]
    packed_rows(config, cached[0], known[0], [7, 8, 9], outcomes, 4)
    assert [mask.shape[0] for mask in compared] == [batch, batch, 1]


def test_clean_rows_come_first_then_slots_and_padding_fills_both() -> None:
    groups = [[SlotGroup(4, 5, [MASKED, 7])], [SlotGroup(0, 1, [MASKED])]]
    made = lay_out("causal", [3, 0], [[40, 41], [50]], groups)
    assert (made.width, made.num_slots) == (2, 2)
    assert made.token_ids.tolist() == [[40, 41, MASKED, 7], [50, 0, MASKED, MASKED]]
    assert made.rows.position[0].tolist() == [3, 4, 5, 6]
    assert made.rows.position[1, :3].tolist() == [0, 1, 1]
    assert made.mask.shape == (2, 4, 3 + 4)
    # the first: three cached tokens, then its own rows; its slots are causal
    assert made.mask[0].int().tolist() == [
        [1, 1, 1, 1, 0, 0, 0],
        [1, 1, 1, 1, 1, 0, 0],
        [1, 1, 1, 1, 1, 1, 0],
        [1, 1, 1, 1, 1, 1, 1],
    ]
    # the second: nothing cached; its slot does not see the padding, nor does anybody see it
    assert made.mask[1, 0].int().tolist() == [1, 0, 0, 0, 0, 0, 0]
    assert made.mask[1, 2].int().tolist() == [1, 0, 1, 0, 0, 0, 0]
