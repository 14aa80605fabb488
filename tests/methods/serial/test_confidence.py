"""Drafts cut at low confidence: the cut itself, and that answers stay the target's own."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from d3d.engine.drafter import Draft
from d3d.methods.serial.drafter import BlockDrafter, confident_prefix
from d3d.model.drafter import DrafterModel
from d3d.target.native import NativeTarget
from support.drafters import block_logits, every_kind, reference_draft, request, text, tiny_drafter
from support.runs import SAMPLING, make, run_all
from support.tiny import tiny_transformer

BLOCK = Draft((5, 6, 7), confidences=(0.5, 0.8, 0.1))


@pytest.mark.parametrize(
    ("least", "num_sure", "length"),
    [
        (None, 0, 3),
        (0.0, 0, 3),
        (0.04, 0, 3),
        (0.041, 0, 2),
        (0.4, 0, 2),
        (0.41, 0, 1),
        (0.6, 0, 0),
        (0.6, 1, 2),
        (0.9, 1, 1),
        (1.0, 1, 1),
    ],
)
def test_a_draft_is_cut_where_its_chance_to_be_kept_as_a_whole_falls_too_low(
    least: float | None, num_sure: int, length: int
) -> None:
    block = confident_prefix(BLOCK, least, num_sure=num_sure)
    assert block.token_ids == BLOCK.token_ids[:length]


def test_what_is_cut_comes_back_nowhere_and_faults_stay() -> None:
    assert len(confident_prefix(BLOCK, 0.41).confidences) == 1
    assert confident_prefix(Draft(fault="broken"), 0.5) == Draft(fault="broken")
    assert confident_prefix(Draft(), 0.5, num_sure=1) == Draft()


def blocks_of(
    model: DrafterModel, least: float | None, *, steps: int = 1, length: int = 6
) -> list[Draft]:
    options = {"num_denoise_steps": steps, "draft_confidence": least, "draft_length": length}
    return [
        BlockDrafter(model, 97, **options).propose([request(text(20, seed))])[0]  # type: ignore
        for seed in range(6)
    ]


@every_kind
def test_confidences_are_what_the_drafter_gives_its_own_tokens(kind: dict[str, Any]) -> None:
    model = tiny_drafter(**kind)
    for seed, block in enumerate(blocks_of(model, 0.0)):
        assert list(block.token_ids) == reference_draft(model, text(20, seed), 6)
        chances = block_logits(model, text(20, seed), [-1] * 6).softmax(-1)
        expected = [
            float(chances[place, token_id]) for place, token_id in enumerate(block.token_ids)
        ]
        assert list(block.confidences) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("steps", [1, 3])
def test_the_cut_is_a_prefix_by_the_running_product(steps: int) -> None:
    model = tiny_drafter()
    whole = blocks_of(model, 0.0, steps=steps)
    reached = [list(itertools.accumulate(block.confidences, lambda a, b: a * b)) for block in whole]
    least = sorted(chance for row in reached for chance in row)[len(whole) * 3]
    cut = blocks_of(model, least, steps=steps)
    assert {len(block.token_ids) for block in cut} != {6}
    for block, full, row in zip(cut, whole, reached, strict=True):
        assert block.token_ids == full.token_ids[: sum(chance >= least for chance in row)]


def test_nobody_pays_for_chances_that_nobody_asked_for() -> None:
    assert all(block.confidences == () for block in blocks_of(tiny_drafter(), None))


@pytest.mark.parametrize("beside", [True, False], ids=["beside the target", "alone"])
@pytest.mark.parametrize("least", [0.01, 0.2, 1.0])
@pytest.mark.parametrize("params", SAMPLING.values(), ids=SAMPLING.keys())
def test_the_answer_stays_the_targets_own(
    params: dict[str, Any], least: float, beside: bool
) -> None:
    base = tiny_transformer(seed=1)
    engine = NativeTarget(base)
    model = tiny_drafter(base, scope="slots" if beside else None)
    plain = run_all(
        engine, None, [make(engine, text(8, seed), max_tokens=24, **params) for seed in range(3)]
    )
    cut = run_all(
        engine,
        BlockDrafter(model, 97, shared_cache=engine.cache_for(model), draft_confidence=least),
        [make(engine, text(8, seed), max_tokens=24, **params) for seed in range(3)],
        draft_length=6,
    )
    assert [one.ids for one in cut] == [one.ids for one in plain]
    assert not any(one.faults for one in cut)


def test_a_higher_threshold_drafts_less_and_keeps_the_targets_own_first_token() -> None:
    base = tiny_transformer(seed=1)
    engine = NativeTarget(base)
    model = tiny_drafter(base)
    drafted, rates = [], []
    for least in (0.0, 0.05, 0.3, 1.0):
        one = run_all(
            engine,
            BlockDrafter(model, 97, shared_cache=engine.cache, draft_confidence=least),
            [make(engine, text(8), max_tokens=60)],
            draft_length=6,
        )[0]
        wanted = one.rounds[:-6]  # the end of an answer cuts drafts, too
        drafted.append(sum(stats.draft_length for stats in wanted) / len(wanted))
        rates.append(
            sum(stats.num_accepted for stats in wanted)
            / sum(stats.draft_length for stats in wanted)
        )
    assert drafted == sorted(drafted, reverse=True)
    assert drafted[0] == 6
    assert drafted[-1] == 1, "the anchor's own row is the target's choice, and stays"
    assert rates[-1] == 1 > rates[0]


def test_a_sampled_request_may_go_without_a_draft() -> None:
    base = tiny_transformer(seed=1)
    engine = NativeTarget(base)
    drafter = BlockDrafter(tiny_drafter(base), 97, shared_cache=engine.cache, draft_confidence=1.0)
    one = run_all(
        engine,
        drafter,
        [make(engine, text(8), max_tokens=20, temperature=1.0, seed=1)],
        draft_length=6,
    )[0]
    assert {stats.draft_length for stats in one.rounds} == {0}
    assert {stats.num_committed for stats in one.rounds} == {1}


def test_nothing_is_sure_where_the_drafter_can_not_draft_every_token() -> None:
    base = tiny_transformer(seed=1)
    engine = NativeTarget(base)
    plain = run_all(engine, None, [make(engine, text(8), max_tokens=20)])[0]
    others = torch.tensor([token_id for token_id in range(97) if token_id not in plain.ids])
    model = tiny_drafter(base, draft_vocabulary=len(others))
    model.set_draft_ids(others)
    one = run_all(
        engine,
        BlockDrafter(model, 97, shared_cache=engine.cache_for(model), draft_confidence=1.0),
        [make(engine, text(8), max_tokens=20)],
        draft_length=6,
    )[0]
    assert one.ids == plain.ids
    assert {stats.draft_length for stats in one.rounds} == {0}
