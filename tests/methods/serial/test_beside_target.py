"""A drafter that is the target with deltas drafts on the target's own cache, and leaves it as it
was."""

from __future__ import annotations

from collections.abc import Sequence as ListLike
from typing import Any

import pytest
import torch

from d3d.engine.drafter import Draft, Target
from d3d.methods.serial.drafter import BlockDrafter
from d3d.target.native import NativeTarget
from support.drafters import every_kind, text, tiny_drafter
from support.runs import SAMPLING, Run, make, run, run_all
from support.tiny import tiny_transformer

Kind = dict[str, Any]


class OnlyBeside(BlockDrafter):
    """Refuses a cache of its own."""

    def open(self, num_sequences: int, capacity: int) -> Any:
        raise AssertionError("it opened a cache of its own")


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
    beside = run_all(target, OnlyBeside(model, 97, steps), five(target, **params), 6)
    assert not any(one.faults for one in beside)
    assert [one.ids for one in beside] == [
        one.ids for one in run_all(target, None, five(target, **params), 0)
    ]

    class OwnCache(BlockDrafter):
        def open_beside(self, target: Target) -> None:
            return None

    own = run_all(target, OwnCache(model, 97, steps), five(target, **params), 6)
    assert [[stats.num_accepted for stats in one.rounds] for one in beside] == [
        [stats.num_accepted for stats in one.rounds] for one in own
    ]


def test_the_cache_is_left_as_it_was(target: NativeTarget) -> None:
    session = target.open(2, 60)
    texts = [text(9, seed=1), text(5, seed=2)]
    session.forward([ids[:-1] for ids in texts])
    keys = [session.cache.read(layer, 8)[0].clone() for layer in range(2)]
    drafts = BlockDrafter(tiny_drafter(target.model), 97).open_beside(session)
    assert drafts is not None
    drafts.draft([sequence(ids) for ids in texts], [6, 6])
    assert session.lengths == [8, 4]
    for layer, before in enumerate(keys):
        after = session.cache.read(layer, 8)[0]
        assert torch.equal(after[0], before[0])
        assert torch.equal(after[1, :, :4], before[1, :, :4])


@pytest.mark.parametrize(
    "change",
    [{"scope": "all"}, {"scope": None}, {"kept_layers": (1,)}],
    ids=["deltas everywhere", "full", "pruned"],
)
def test_what_is_not_the_target_with_deltas_keeps_its_own_cache(
    change: dict[str, Any], target: NativeTarget
) -> None:
    assert (
        BlockDrafter(tiny_drafter(target.model, **change), 97).open_beside(target.open(1, 10))
        is None
    )


def test_another_target_of_the_same_shape_is_not_its_base(target: NativeTarget) -> None:
    other = NativeTarget(tiny_transformer(seed=2))
    drafter = BlockDrafter(tiny_drafter(other.model), 97)
    assert drafter.open_beside(target.open(1, 10)) is None
    assert run(target, drafter, max_tokens=20).ids == run(target, max_tokens=20).ids


def test_numbers_that_are_not_finite_never_reach_another_sequence(target: NativeTarget) -> None:
    model = tiny_drafter(target.model)
    model.set_mask_vector(torch.full_like(model.mask_vector, float("nan")))  # type: ignore[arg-type]
    broken = run_all(target, OnlyBeside(model, 97), five(target), 6)
    assert [one.ids for one in broken] == [
        one.ids for one in run_all(target, None, five(target), 0)
    ]
    assert all(
        one.faults == ["the drafter's logits are not finite"] for one in broken if one.faults
    )
    assert any(one.faults for one in broken)


def test_one_that_stops_drafting_does_not_disturb_the_others(target: NativeTarget) -> None:
    class Spoiled(BesideTargetSession):
        def draft(self, sequences: ListLike[Sequence], lengths: ListLike[int]) -> list[Draft]:
            blocks = super().draft(sequences, lengths)
            odd = {row for row, one in enumerate(sequences) if one.prompt_length == 5}
            return [
                Draft(fault="spoiled") if row in odd else block for row, block in enumerate(blocks)
            ]

    class Drafter(OnlyBeside):
        def open_beside(self, target: Target) -> BesideTargetSession | None:
            assert isinstance(target, NativeTarget)
            return Spoiled(self, target.cache)

    runs = run_all(target, Drafter(tiny_drafter(target.model), 97), five(target), 4)
    assert [one.ids for one in runs] == [one.ids for one in run_all(target, None, five(target), 0)]
    assert [one.faults for one in runs] == [[], [], ["spoiled"], [], []]
    assert all(stats.draft_length == 4 for one in runs[:2] for stats in one.rounds[:-4])
