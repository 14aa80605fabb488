"""Who sees whom: three forms of the same rule, and what that means for logits."""

from __future__ import annotations

import random

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask, create_mask, flex_attention

from d3d.model.attention import attend
from d3d.model.kv_cache import PassThrough
from d3d.model.masks.dense import causal, dense, elementwise
from d3d.model.masks.flex import mask_mod
from d3d.model.masks.rules import CLEAN, NOWHERE, BlockAttention, Rows, Rule, block_rules, union
from support.tiny import tiny_transformer

BOTH = pytest.mark.parametrize("attention", ["causal", "bidirectional"])
SEEDS = pytest.mark.parametrize("seed", range(6))


def random_layout(seed: int) -> Rows:
    """Documents packed into one row: clean texts, blocks at random anchors, padding; shuffled, for
    order must not matter."""
    rng = random.Random(seed)
    rows: list[tuple[int, int, int, int]] = []
    block = 0
    for document in range(rng.randint(1, 3)):
        length = rng.randint(1, 7)
        rows += [(position, position, CLEAN, document) for position in range(length)]
        for _ in range(rng.randint(0, 3)):
            anchor = rng.randrange(length)  # two blocks may share an anchor
            rows += [(anchor + j, anchor, block, document) for j in range(1, rng.randint(1, 4) + 1)]
            block += 1
    rows += [(NOWHERE, NOWHERE, CLEAN, 0)] * rng.randint(0, 2)
    rng.shuffle(rows)
    return Rows(*torch.tensor(rows).unbind(1))


def written_out(query: Rows, key: Rows, attention: str) -> bool:
    """The design's sentences, one pair at a time."""
    q, k = (
        {name: int(getattr(row, name)) for name in ("position", "anchor", "block", "document")}
        for row in (query, key)
    )
    if q["document"] != k["document"]:
        return False
    if q["block"] == CLEAN:
        return k["block"] == CLEAN and k["position"] <= q["position"]
    if k["block"] == CLEAN:
        return k["position"] <= q["anchor"]
    return k["block"] == q["block"] and (
        attention == "bidirectional" or k["position"] <= q["position"]
    )


@BOTH
@SEEDS
def test_dense_loop_and_flex_agree(attention: BlockAttention, seed: int) -> None:
    rows = random_layout(seed)
    rule = union(block_rules(attention))
    mask = dense(rule, rows, rows)
    count = len(rows.position)
    assert torch.equal(mask, elementwise(rule, rows, rows))
    assert mask.tolist() == [
        [written_out(rows[i], rows[j], attention) for j in range(count)] for i in range(count)
    ]
    assert mask.diagonal().all()
    flex = mask_mod(rule, rows[None], rows[None])
    assert torch.equal(create_mask(flex, 1, 1, count, count, device="cpu")[0, 0], mask)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@BOTH
def test_flex_attention_with_the_rule_equals_ours_with_the_dense_mask(
    attention: BlockAttention,
) -> None:
    layouts = [random_layout(seed) for seed in (3, 4)]
    count = min(len(rows.position) for rows in layouts)
    rows = Rows(
        *(
            torch.stack([getattr(r, name)[:count] for r in layouts])
            for name in ("position", "anchor", "block", "document")
        )
    )
    rule = union(block_rules(attention))
    block_mask = create_block_mask(
        mask_mod(rule, rows, rows), 2, None, count, count, device="cpu", BLOCK_SIZE=8
    )
    query, key, value = (
        torch.randn(2, 4, count, 8),
        torch.randn(2, 2, count, 8),
        torch.randn(2, 2, count, 8),
    )
    expected = attend(query, key, value, dense(rule, rows, rows))
    got = flex_attention(query, key, value, block_mask=block_mask, enable_gqa=True)
    torch.testing.assert_close(got.transpose(1, 2).flatten(2), expected, atol=1e-5, rtol=1e-5)


def test_each_part_of_the_union_is_needed() -> None:
    rows = random_layout(0)
    for attention in ("causal", "bidirectional"):
        rules = block_rules(attention)
        whole = dense(union(rules), rows, rows)
        for left_out in range(len(rules)):
            rest: tuple[Rule, ...] = tuple(rule for i, rule in enumerate(rules) if i != left_out)
            assert not torch.equal(dense(union(rest), rows, rows), whole)


def test_a_plain_causal_pass_counts_from_each_sequences_start() -> None:
    mask = causal(torch.tensor([3, 0]), 2, 5)
    assert mask.int().tolist() == [
        [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]],
        [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0]],
    ]


@BOTH
@SEEDS
@torch.no_grad()
def test_a_token_changes_the_logits_of_the_rows_that_see_it_and_of_no_other(
    attention: BlockAttention, seed: int
) -> None:
    """Through two layers: what a visible row sees is visible itself, so nothing hidden comes in by
    a detour."""
    model = tiny_transformer(seed=1)
    rows = random_layout(seed)
    count = len(rows.position)
    mask = dense(union(block_rules(attention)), rows, rows)
    token_ids = torch.randint(0, 97, (count,), generator=torch.Generator().manual_seed(seed))
    variants = token_ids.repeat(count + 1, 1)
    variants[torch.arange(1, count + 1), torch.arange(count)] = (token_ids + 1) % 97
    hidden = model.hidden(
        model.embed(variants), rows.position.clamp(max=60)[None], mask[None], PassThrough()
    )
    moved = (model.logits(hidden[1:]) - model.logits(hidden[0])).abs().amax(-1) > 1e-5
    assert torch.equal(moved.T, mask)
