"""More requests than fit a batch: waiting ones replace ended ones, without any effect on
answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from d3d.engine.drafter import Draft, Drafter
from d3d.engine.engine import Engine
from d3d.engine.request import Request
from d3d.methods.draft_model.drafter import DraftModelDrafter
from d3d.methods.fused.engine import FusedTarget
from d3d.methods.ngram.drafter import NgramDrafter
from d3d.methods.serial import denoise
from d3d.methods.serial.drafter import BlockDrafter
from d3d.model.drafter import DrafterModel
from d3d.target.native import NativeTarget
from support.doubles import Double, failing, faulty, noisy, oracle
from support.drafters import every_kind, text, tiny_drafter
from support.runs import SAMPLING, Run, Watched, make, run_all
from support.tiny import tiny_transformer

LENGTHS = (3, 60, 9, 1, 28, 44, 2, 17, 5, 33)
LIMITS = (13, 5, 1, 20, 1, 7, 15, 1, 16, 18)
WAYS = (
    "greedy",
    "temperature",
    "greedy penalties",
    "hot",
    "greedy",
    "everything",
    "bias",
    "greedy",
    "sampled penalties",
    "top_p",
)


def ten(target: NativeTarget) -> list[Run]:
    """Prompts and answers of mixed length; some end with their first token."""
    return [
        make(target, text(length, seed=number), **{**SAMPLING[way], "max_tokens": limit})
        for number, (length, limit, way) in enumerate(zip(LENGTHS, LIMITS, WAYS, strict=True))
    ]


def alone(target: NativeTarget) -> list[Run]:
    return [run_all(target, None, [one])[0] for one in ten(target)]


def ids(runs: list[Run]) -> list[list[int]]:
    return [one.ids for one in runs]


class Compared(Drafter):
    """A drafter that checks that a fresh one would have drafted the same."""

    def __init__(self, make_drafter: Callable[[], Drafter]) -> None:
        self.make_drafter, self.inner = make_drafter, make_drafter()
        self.max_draft_length = self.inner.max_draft_length

    def propose(self, requests: Sequence[Request]) -> list[Draft]:
        fresh = self.make_drafter()
        fresh.max_draft_length = self.inner.max_draft_length = self.max_draft_length
        drafts = self.inner.propose(requests)
        assert drafts == fresh.propose(requests)
        return drafts

    def end(self, request: Request) -> None:
        self.inner.end(request)

    @property
    def num_held(self) -> int:
        return self.inner.num_held


def own_cache(model: DrafterModel, steps: int = 1) -> Drafter:
    return Compared(lambda: BlockDrafter(model, 97, num_denoise_steps=steps))


def beside(target: NativeTarget, model: DrafterModel) -> BlockDrafter:
    cache = target.cache_for(model)
    assert cache is not None
    return BlockDrafter(model, 97, shared_cache=cache)


@pytest.fixture(scope="module")
def small() -> NativeTarget:
    return NativeTarget(tiny_transformer(seed=1))


@pytest.mark.parametrize("max_batch", [1, 2, 3, 10, 50])
def test_plain_answers_are_those_alone(max_batch: int, small: NativeTarget) -> None:
    together = run_all(small, None, ten(small), 0, max_batch)
    assert ids(together) == ids(alone(small))
    assert [one.finish_reason for one in together] == ["length"] * 10


@pytest.mark.slow
@every_kind
@pytest.mark.parametrize("max_batch", [1, 3])
def test_drafts_and_answers_are_those_alone(
    kind: dict[str, Any], max_batch: int, small: NativeTarget
) -> None:
    model = tiny_drafter(small.model, **kind)
    expected = ids(alone(small))
    for drafter in (own_cache(model), own_cache(model, steps=2), beside(small, model)):
        together = run_all(small, drafter, ten(small), 6, max_batch)
        assert ids(together) == expected
        assert not any(one.faults for one in together), "a failed comparison shows as a fault"
        assert sum(stats.draft_length for one in together for stats in one.rounds) > 200


@pytest.mark.parametrize("max_batch", [1, 2, 4])
def test_fused_answers_are_those_alone(max_batch: int, small: NativeTarget) -> None:
    engine = FusedTarget(small, tiny_drafter(small.model), 4, 12)
    together = run_all(engine, engine, ten(small), 4, max_batch)
    assert ids(together) == ids(alone(small))
    assert not any(one.faults for one in together)
    drafted = [stats.draft_length > 0 for one in together for stats in one.rounds]
    assert sum(drafted) > len(drafted) / 2, (
        "a request that joins must not cost the others their drafts"
    )


@pytest.mark.slow
def test_other_drafters_join_too(small: NativeTarget) -> None:
    expected = alone(small)
    answers = [one.token_ids for one in expected]
    drafters: list[Drafter] = [
        NgramDrafter(5),
        DraftModelDrafter(tiny_transformer(seed=2), 97, 5),
        DraftModelDrafter(small.model, 97, 5),
        oracle(5, answers),
    ]
    for drafter in drafters:
        together = run_all(small, drafter, ten(small), 5, 3)
        assert ids(together) == ids(expected)
        assert not any(one.faults for one in together)
    assert all(stats.num_accepted == stats.draft_length for one in together for stats in one.rounds)


def test_a_draft_model_drafts_for_those_that_join_what_it_drafts_alone(small: NativeTarget) -> None:
    model = tiny_transformer(seed=2)
    drafter = Compared(lambda: DraftModelDrafter(model, 97, 5))
    together = run_all(small, drafter, ten(small), 5, 3)
    assert not any(one.faults for one in together)


def test_a_batch_is_never_larger_and_those_that_wait_join_at_once(small: NativeTarget) -> None:
    watched = Watched(small)
    runs = ten(small)
    engine = Engine(watched, max_batch=3)
    for one in runs:
        engine.add(one.request)
    while engine.has_work:
        verified, waiting = len(watched.fed), len(engine.waiting)
        rounds = engine.step()
        assert len(engine.running) + len(engine.reading) <= 3
        if waiting and verified:
            batch = len(watched.fed[-1]) if len(watched.fed) > verified else 0
            begun = sum(not round_.number for round_ in rounds)
            assert batch + begun == 3, "no place stays empty while somebody waits"
    assert [len(one.ids) for one in runs] == list(LIMITS)


def test_a_prompt_that_joins_is_run_without_the_others(
    small: NativeTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes: list[tuple[int, int]] = []
    original = small.model.hidden

    def watch(x: Any, *rest: Any) -> Any:
        passes.append(tuple(x.shape[:2]))
        return original(x, *rest)

    monkeypatch.setattr(small.model, "hidden", watch)
    run_all(
        small,
        None,
        [make(small, text(n), max_tokens=limit) for n, limit in ((4, 30), (4, 2), (50, 5))],
        0,
        2,
    )
    assert passes[:2] == [(1, 4), (1, 4)]
    assert (1, 50) in passes
    assert set(passes) == {(1, 4), (2, 1), (1, 50), (1, 1)}


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 4, 1000])
def test_a_drafter_catches_up_with_those_that_join_in_chunks(
    rows: int, small: NativeTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(denoise, "CATCH_UP_ROWS", rows)
    together = run_all(small, own_cache(tiny_drafter(small.model, scope="all")), ten(small), 6, 3)
    assert ids(together) == ids(alone(small))
    assert not any(one.faults for one in together)


@pytest.mark.parametrize("at_draft", [0, 1, 5])
def test_after_a_failure_nobody_who_joins_drafts(at_draft: int, small: NativeTarget) -> None:
    expected = alone(small)
    drafter = failing(noisy(0.3, 3, 4, [one.token_ids for one in expected], 97), at_draft)
    together = run_all(small, drafter, ten(small), 4, 3)
    assert ids(together) == ids(expected)
    assert all(len(one.faults) <= 1 for one in together)
    late = together[-1]
    assert late.faults == [
        "the drafter failed 3 times in a row and is asked no more: "
        f"RuntimeError: told to fail in draft {at_draft}"
    ]
    assert not any(stats.draft_length for stats in late.rounds)


@pytest.mark.parametrize("shared", [True, False])
def test_a_fault_of_one_ends_its_own_drafting_while_others_come_and_go(
    shared: bool, small: NativeTarget
) -> None:
    """The faulty one keeps its place in the target's batch."""
    model = tiny_drafter(small.model)
    inner = beside(small, model) if shared else BlockDrafter(model, 97)

    class Spoiling(Drafter):
        max_draft_length = 6

        def propose(self, requests: Sequence[Request]) -> list[Draft]:
            drafts = inner.propose(requests)
            assert drafts == BlockDrafter(model, 97).propose(requests)
            return [
                Draft(fault="told so") if request.prompt_length in (3, 60) else draft
                for request, draft in zip(requests, drafts, strict=True)
            ]

        def end(self, request: Request) -> None:
            inner.end(request)

        @property
        def num_held(self) -> int:
            return inner.num_held

    together = run_all(small, Spoiling(), ten(small), 6, 2)
    assert ids(together) == ids(alone(small))
    assert [one.faults for one in together] == [["told so"]] * 2 + [[]] * 8
    assert sum(stats.draft_length for one in together[2:] for stats in one.rounds) > 200


def test_faults_one_after_another(small: NativeTarget) -> None:
    """Others draft on when all that drafted have been faulty."""
    expected = alone(small)
    right = oracle(4, [one.token_ids for one in expected])
    broken = faulty(right, 0)

    def propose(request: Request, length: int, number: int) -> Draft:
        one = broken if request.prompt_length in (3, 60, 9) else right
        return one.make_draft(request, length, number)

    together = run_all(small, Double(4, propose), ten(small), 4, 2)
    assert ids(together) == ids(expected)
    assert sum(stats.num_accepted for stats in together[-1].rounds) > 10


def test_a_batch_of_nobody_is_refused(small: NativeTarget) -> None:
    with pytest.raises(ValueError, match="must be 1 or more, got 0 and 512"):
        run_all(small, None, ten(small), 0, 0)
