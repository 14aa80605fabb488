"""Masks of the passes that draft, made from the pass's own rows, against those that look at every
cache place."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from d3d.methods.async_.outcomes import Outcome
from d3d.methods.async_.packed_layout import packed_rows
from d3d.methods.fused.engine import fused_layout
from d3d.methods.serial.denoise import draft_layout
from d3d.model import layout
from d3d.model.drafter import DrafterConfig
from d3d.model.layout import MASKED, BranchAnchor, PassLayout, SlotGroup, lay_out
from d3d.model.masks.dense import dense, elementwise
from d3d.model.masks.rules import TRUNK, BlockAttention, Rows, Rule, packed_rules, union

CONFIGS = [
    DrafterConfig(block_size=6, kept_layers=(0, 1), block_attention="causal"),
    DrafterConfig(
        block_size=6, kept_layers=(0, 1), block_attention="bidirectional", alignment="same"
    ),
    DrafterConfig(block_size=6, kept_layers=(0, 1), anchor_slot=True),
]
BOTH = pytest.mark.parametrize("attention", ["causal", "bidirectional"])


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


def check(made: PassLayout, attention: BlockAttention, cached: Sequence[int]) -> None:
    """The mask is that of the rules, one pair at a time, over the cached tokens and the rows. The
    rules of packed passes hold for every pass: without branches they add nothing."""
    rule, num_rows = union(packed_rules(attention)), made.width + made.num_slots
    assert made.mask.shape == (len(cached), num_rows, max(cached) + num_rows)
    for sequence, length in enumerate(cached):
        rows, mask = made.rows[sequence], made.mask[sequence]
        keys = Rows.concatenate(Rows.clean(torch.arange(length)), rows)
        assert torch.equal(mask[:, : length + num_rows], elementwise(rule, rows, keys))
        assert not mask[:, length + num_rows :].any(), "nothing is there"
        assert mask[:, length : length + num_rows].diagonal().all(), "a row sees itself"
        assert mask[:, :length].all(), "and all of the cache"


@BOTH
@pytest.mark.parametrize("cached", [[3], [0, 4]])
def test_the_masks_of_all_methods_are_those_of_the_rules(
    attention: BlockAttention, cached: list[int]
) -> None:
    for start in ({}, {"alignment": "same"}, {"anchor_slot": True}):
        config = DrafterConfig(block_size=6, kept_layers=(0, 1), block_attention=attention, **start)
        known = [list(range(10, 15 + sequence)) for sequence in range(len(cached))]
        blocks = [[MASKED] * 3] * len(cached)
        serial, num_clean = draft_layout(config, cached, known, blocks)
        check(serial, attention, cached)
        assert num_clean == [
            len(text) - config.anchor_slot - length
            for text, length in zip(known, cached, strict=True)
        ]
        trunks = [[20, 30, 31][: 3 - sequence] for sequence in range(len(cached))]
        check(
            fused_layout(config, cached, trunks, [(2, 0, 1), (0, 2)][: len(cached)]),
            attention,
            cached,
        )
        outcomes = [Outcome(2, 4), Outcome(0, 5), Outcome(0, 6)]
        for length in cached:
            packed = packed_rows(config, length, known[0], [7, 8], outcomes, 2)
            check(packed.layout, attention, [length])


class RandomPass:
    """Anything that `lay_out` can be asked for, and the design's sentences about it.

    A row is named by its token, and each token is there once."""

    def __init__(self, seed: int) -> None:
        draw = random.Random(seed)
        batch = draw.randint(1, 3)
        self.cached = [draw.randint(0, 4)] * batch if seed % 2 else draw.choices(range(5), k=batch)
        self.trunks: list[list[int]] = []
        self.branches: list[list[BranchAnchor]] = []
        self.groups: list[list[SlotGroup]] = []
        token = iter(range(100, 1000))
        for start in self.cached:
            trunk = [next(token) for _ in range(draw.randint(not start, 3))]
            end = start + len(trunk)
            branches, groups = [], []
            for _ in range(draw.randint(0, 2)):
                anchor = draw.randint(max(0, start - 1), end - 1)  # two may share one
                slots = [next(token) for _ in range(draw.randint(1, 3))]
                groups.append(SlotGroup(anchor, anchor + 1, slots, has_guess=draw.random() < 0.3))
            # of a pass, either all anchors are clean rows or all are first slots
            for branch in range(1, draw.randint(0, 2) + 1):
                position = draw.randint(max(1, start), end)
                slots = [next(token) for _ in range(draw.randint(1, 3))]
                if seed % 3:
                    branches.append(BranchAnchor(position, next(token)))
                    if draw.random() < 0.2:
                        continue  # an anchor that nothing hangs at
                first = position + (seed % 3 > 0)
                has_guess = draw.random() < 0.7
                groups.append(SlotGroup(position, first, slots, branch, has_guess))
            draw.shuffle(groups)
            self.trunks.append(trunk)
            self.branches.append(branches)
            self.groups.append(groups)

    def laid_out(self, attention: BlockAttention) -> PassLayout:
        branches = self.branches if any(self.branches) else ()
        return lay_out(attention, self.cached, self.trunks, self.groups, branches)

    def seen(self, attention: BlockAttention, sequence: int) -> dict[int, tuple[int, set[int]]]:
        """Position of each real row, and the real rows that it sees; the cache apart."""
        start, trunk = self.cached[sequence], self.trunks[sequence]
        position = dict(zip(trunk, range(start, start + len(trunk)), strict=True))
        rows = {
            token: (at, {other for other in trunk if position[other] <= at})
            for token, at in position.items()
        }
        anchors: dict[int, set[int]] = {}
        for branch, anchor in enumerate(self.branches[sequence], 1):
            anchors[branch] = {anchor.token_id}
            before = {token for token in trunk if position[token] < anchor.position}
            rows[anchor.token_id] = (anchor.position, before | anchors[branch])
        for group in self.groups[sequence]:
            tokens, last = list(group.token_ids), len(group.token_ids) - group.has_guess
            reach = group.anchor + (group.branch == TRUNK)
            clean = {token for token in trunk if position[token] < reach}
            clean |= anchors.get(group.branch, set())
            for depth, token in enumerate(tokens):
                block = tokens[: depth + 1 if attention == "causal" else last]
                rows[token] = (group.first + depth, clean | set(block) | {token})
        return rows


@BOTH
@pytest.mark.parametrize("seed", range(24))
def test_any_pass_has_the_mask_of_the_rules(attention: BlockAttention, seed: int) -> None:
    asked = RandomPass(seed)
    check(asked.laid_out(attention), attention, asked.cached)


@BOTH
@pytest.mark.parametrize("seed", range(60))
def test_every_row_of_any_pass_sees_what_it_should(attention: BlockAttention, seed: int) -> None:
    asked = RandomPass(seed)
    made = asked.laid_out(attention)
    for sequence, length in enumerate(asked.cached):
        rows = asked.seen(attention, sequence)
        slots = [token for group in asked.groups[sequence] for token in group.token_ids]
        tokens = made.token_ids[sequence].tolist()
        real = [token for token in tokens if token in rows]
        assert sorted(real) == sorted(rows), "every row is there once, the others are padding"
        assert set(tokens) - set(rows) <= {0, MASKED}
        for row, token in enumerate(tokens):
            own = made.mask[sequence, row, length : length + len(tokens)]
            seen = {tokens[key] for key in own.nonzero()[:, 0].tolist()}
            if token in rows:
                assert (int(made.rows.position[sequence, row]), seen) == rows[token]
            else:
                assert seen.isdisjoint(slots), "padding"
        assert tokens[made.width : made.width + len(slots)] == slots
        anchors = [anchor.token_id for anchor in asked.branches[sequence]]
        clean = [*asked.trunks[sequence], *anchors]
        assert tokens[: len(clean)] == clean
