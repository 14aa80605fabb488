"""A drafter that is the target with deltas drafts on the target's own cache, and leaves it
unchanged."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from d3d.engine.drafter import NO_DRAFT, Draft
from d3d.engine.request import Request
from d3d.methods.serial.drafter import BlockDrafter
from d3d.model.drafter import DrafterModel
from d3d.target.native import NativeTarget
from support.drafters import every_kind, request, text, tiny_drafter
from support.runs import SAMPLING, Run, make, run, run_all
from support.tiny import tiny_transformer

Kind = dict[str, Any]


def beside(target: NativeTarget, model: DrafterModel, **options: Any) -> BlockDrafter:
    """A drafter on the target's own cache."""
    cache = target.cache_for(model)
    assert cache is target.cache
    return BlockDrafter(model, 97, shared_cache=cache, **options)


@pytest.fixture(scope="module")
def target() -> NativeTarget:
    return NativeTarget(tiny_transformer(seed=1))


def five(target: NativeTarget, **params: Any) -> list[Run]:
    """Of different length, so that they end one after another."""
    return [
        make(target, text(3 + number, seed=number), max_tokens=6 + 11 * (number * 3 % 5), **params)
        for number in range(5)
    ]


@every_kind
@pytest.mark.parametrize("sampling", ["greedy", "temperature"])
@pytest.mark.parametrize("steps", [1, 2])
def test_answers_and_drafts_are_those_with_a_cache_of_its_own(
    kind: Kind, sampling: str, steps: int, target: NativeTarget
) -> None:
    params = SAMPLING[sampling]
    model = tiny_drafter(target.model, **kind)
    shared = beside(target, model, num_denoise_steps=steps)
    together = run_all(target, shared, five(target, **params))
    assert not any(one.faults for one in together)
    assert [one.ids for one in together] == [
        one.ids for one in run_all(target, None, five(target, **params))
    ]
    alone = BlockDrafter(model, 97, num_denoise_steps=steps)
    own = run_all(target, alone, five(target, **params))
    assert [[stats[:3] for stats in one.rounds] for one in together] == [
        [stats[:3] for stats in one.rounds] for one in own
    ]


@every_kind
@pytest.mark.parametrize("asked", [(0, 1, 2), (0, 2), (2, 0), (1,)], ids=str)
def test_the_cache_is_left_as_it_was(kind: Kind, asked: tuple[int, ...]) -> None:
    target = NativeTarget(tiny_transformer(seed=1))
    requests = [request(text(length, seed=length)) for length in (9, 5, 12)]
    ids = [one.id for one in requests]
    target.forward(ids, [one.token_ids[:-1] for one in requests])
    before = [[part.clone() for part in target.cache.window(ids).read(i, 11)] for i in range(2)]
    drafter = beside(target, tiny_drafter(target.model, **kind))
    assert [drafter.num_missing(one) for one in requests] == [0, 0, 0]
    drafts = drafter.propose([requests[place] for place in asked])
    assert [len(draft.token_ids) for draft in drafts] == [6] * len(asked)
    assert drafts == BlockDrafter(drafter.model, 97).propose([requests[i] for i in asked])
    assert target.cache.lengths == [8, 4, 11]
    assert drafter.num_held == 0
    for layer, parts in enumerate(before):
        for part, now in zip(parts, target.cache.window(ids).read(layer, 11), strict=True):
            for row, length in enumerate((8, 4, 11)):
                assert torch.equal(now[row, :, :length], part[row, :, :length])


@pytest.mark.parametrize(
    "change",
    [{"scope": "all"}, {"scope": None}, {"kept_layers": (1,)}],
    ids=["deltas everywhere", "full", "pruned"],
)
def test_what_is_not_the_target_with_deltas_keeps_its_own_cache(
    change: dict[str, Any], target: NativeTarget
) -> None:
    assert target.cache_for(tiny_drafter(target.model, **change)) is None


def test_another_target_of_the_same_shape_is_not_its_base(target: NativeTarget) -> None:
    other = NativeTarget(tiny_transformer(seed=2))
    model = tiny_drafter(other.model)
    assert target.cache_for(model) is None
    assert other.cache_for(model) is other.cache
    drafter = BlockDrafter(model, 97)
    assert run(target, drafter, max_tokens=20).ids == run(target, max_tokens=20).ids


def broken(target: NativeTarget) -> DrafterModel:
    model = tiny_drafter(target.model)
    model.set_mask_vector(torch.full_like(model.mask_vector, float("nan")))  # type: ignore[arg-type]
    return model


def test_numbers_that_are_not_finite_never_reach_another_request(target: NativeTarget) -> None:
    runs = run_all(target, beside(target, broken(target)), five(target))
    assert [one.ids for one in runs] == [one.ids for one in run_all(target, None, five(target))]
    for one in runs:
        assert all("not finite (NaN or infinite) in a draft pass" in fault for fault in one.faults)
        assert len(one.faults) <= 1
    assert any(one.faults for one in runs)


def test_nor_slots_of_a_pass_that_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    target = NativeTarget(tiny_transformer(seed=1))
    one = request(text(9, seed=9))
    target.forward([one.id], [one.token_ids[:-1]])
    model = broken(target)

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(model, "few_logits", fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        beside(target, model).propose([one])
    assert torch.isfinite(target.cache.keys).all()
    assert torch.isfinite(target.cache.values).all()


def test_nor_a_bystander_that_was_not_drafted_for() -> None:
    """Slots of a pass fall behind everybody in it; in the target's next pass a hidden number that
    is not finite would still count."""
    target = NativeTarget(tiny_transformer(seed=1))
    first, between, last = (request(text(length, seed=length)) for length in (9, 5, 12))
    ids = [first.id, between.id, last.id]
    texts = [one.token_ids for one in (first, between, last)]
    target.forward(ids, [token_ids[:-1] for token_ids in texts])
    drafter = beside(target, broken(target))
    assert all(draft.fault for draft in drafter.propose([first, last]))
    cache = target.cache
    assert torch.isfinite(cache.keys).all()
    assert torch.isfinite(cache.values).all()
    rows = target.verify([first, between, last], [NO_DRAFT] * 3)
    for token_ids, logits in zip(texts, rows, strict=True):
        (expected,) = NativeTarget(target.model).forward([0], [token_ids], last_only=True)
        torch.testing.assert_close(logits.raw, expected.raw, atol=1e-5, rtol=1e-5)


def test_one_that_stops_drafting_does_not_disturb_the_others(target: NativeTarget) -> None:
    class Spoiled(BlockDrafter):
        def propose(self, requests: Sequence[Request]) -> list[Draft]:
            return [
                Draft(fault="spoiled") if one.prompt_length == 5 else draft
                for one, draft in zip(requests, super().propose(requests), strict=True)
            ]

    model = tiny_drafter(target.model)
    drafter = Spoiled(model, 97, draft_length=4, shared_cache=target.cache_for(model))
    runs = run_all(target, drafter, five(target))
    assert [one.ids for one in runs] == [one.ids for one in run_all(target, None, five(target))]
    assert [one.faults for one in runs] == [[], [], ["spoiled"], [], []]
    assert all(stats.draft_length == 4 for one in runs[:2] for stats in one.rounds[:-4])
