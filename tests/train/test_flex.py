"""FlexAttention with the rules against the dense masks: the same states of slots and of clean
rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from d3d.model.masks.rules import Rows, block_rules, union
from d3d.train.blocks import FlexStore, clean_pass, hang_blocks, joint_pass, slot_pass
from support.drafters import every_kind, text, tiny_drafter

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")


@every_kind
@torch.no_grad()  # on a CPU it has no derivative
def test_slots_and_clean_rows_are_those_of_the_dense_masks(kind: dict[str, Any]) -> None:
    model = tiny_drafter(**kind)
    token_ids = torch.tensor(text(14))
    batch = hang_blocks(token_ids, torch.tensor([3, 9, 4]), 4, model.config)
    rule = union(block_rules(model.config.block_attention))
    clean = Rows.clean(torch.arange(14))
    everything = Rows.concatenate(clean, batch.rows)
    _, cache = clean_pass(model, token_ids)

    behind = FlexStore(rule, batch.rows, everything, cache)
    slots = model.hidden(batch.token_ids[None], batch.rows.position[None], None, behind, 12)[0]
    torch.testing.assert_close(slots, slot_pass(model, cache, batch), atol=1e-4, rtol=1e-4)

    together = FlexStore(rule, everything, everything)
    ids = torch.cat((token_ids, batch.token_ids))
    hidden = model.hidden(ids[None], everything.position[None], None, together, 12)[0]
    torch.testing.assert_close(
        hidden, torch.cat(joint_pass(model, token_ids, batch)), atol=1e-4, rtol=1e-4
    )
