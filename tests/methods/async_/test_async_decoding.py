"""Async mode gives plain mode's answers, whatever the worker returns, however late, and however it
fails."""

from __future__ import annotations

import gc
import itertools
import threading
import time
import tracemalloc
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from d3d.methods.async_.packed_pass import PackedDrafter
from d3d.methods.async_.preparer import Preparer
from d3d.target.native import NativeTarget
from support.async_runs import (
    Slow,
    Unhurried,
    async_drafter,
    causes,
    coordinating,
    decode,
    notes,
    preparations,
    readiness,
    rehearsed,
)
from support.doubles import PreparingDouble, faulty, foresees, oracle
from support.drafters import EVERY_KIND, text, tiny_drafter
from support.runs import SAMPLING, Run, make, run, run_all

POLICIES = pytest.mark.parametrize("miss_policy", ["draft_now", "bonus_only"])
PROMPTS = [text(2 + 3 * number, seed=number) for number in range(6)]


def plain(target: NativeTarget, **params: Any) -> list[Run]:
    return [run(target, None, prompt, **params) for prompt in PROMPTS]


def six(target: NativeTarget, **params: Any) -> list[Run]:
    return [make(target, prompt, **params) for prompt in PROMPTS]


def answers(runs: list[Run]) -> list[list[int]]:
    return [one.token_ids for one in runs]


# The answer is the target's own


@POLICIES
@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("hits", [1.0, 0.0, 0.6])
def test_ids_equal_plain_whether_rounds_hit_or_miss(
    hits: float, sampling: str, miss_policy: str, target: NativeTarget
) -> None:
    params = SAMPLING[sampling] | {"max_tokens": 40}
    expected = plain(target, **params)
    with coordinating(lambda: rehearsed(answers(expected), wrong=0.15, hits=hits)) as coordinator:
        drafter = async_drafter(coordinator, miss_policy=miss_policy)
        together = run_all(target, drafter, six(target, **params), 8)
        alone = run(target, drafter, PROMPTS[2], draft_length=8, **params)
    assert [one.ids for one in together] == [one.ids for one in expected]
    assert alone.ids == expected[2].ids
    assert not any(one.faults for one in [*together, alone])
    seen = set(readiness(alone)[1:])
    assert (
        seen
        <= {
            0.0: {"miss", "late", "unprepared"},
            0.6: {"hit", "late", "miss", "unprepared"},
            1.0: {"hit", "late"},
        }[hits]
    )


@pytest.mark.parametrize(
    "kind", EVERY_KIND, ids=lambda kind: f"{kind['block_attention']}-{kind['alignment']}"
)
@pytest.mark.parametrize("sampling", ["greedy", "everything"])
@pytest.mark.parametrize(("block_size", "budget"), [(4, 1), (8, 5), (16, 32)])
def test_ids_equal_plain_with_a_drafter_of_every_kind(
    kind: dict[str, Any], sampling: str, block_size: int, budget: int, target: NativeTarget
) -> None:
    model = tiny_drafter(target.model, block_size=block_size, previous_token_width=8, **kind)
    params = SAMPLING[sampling] | {"max_tokens": 24}
    expected = plain(target, **params)[:3]
    with coordinating(lambda: PackedDrafter(model, 97)) as coordinator:
        drafter = async_drafter(coordinator, draft_length=block_size, outcome_budget=budget)
        together = run_all(target, drafter, six(target, **params)[:3], block_size)
    assert [one.ids for one in together] == [one.ids for one in expected]
    assert sum(sum(round_.draft_length for round_ in one.rounds) for one in together) > 100
    assert not any(one.faults for one in together)


def test_a_drafter_whose_clean_rows_are_the_targets_keeps_every_draft_of_one_token(
    target: NativeTarget,
) -> None:
    """The anchor's own row drafts it, behind whatever the round before has kept."""
    model = tiny_drafter(target.model)
    with coordinating(lambda: PackedDrafter(model, 97)) as coordinator:
        drafter = async_drafter(coordinator, draft_length=1, outcome_budget=40)
        one = run(Unhurried(target, coordinator), drafter, max_tokens=40, draft_length=1)
    assert one.ids == run(target, max_tokens=40).ids
    assert all(round_.num_accepted == 1 for round_ in one.rounds[:-1])
    assert {"hit", "miss"} <= set(readiness(one)[1:]), (
        "40 of 97 guesses of a bonus token, by slots that were never trained"
    )


@pytest.mark.slow
@POLICIES
@pytest.mark.parametrize("block_size", [4, 8, 16])
def test_random_delays_change_nothing(
    block_size: int, miss_policy: str, target: NativeTarget
) -> None:
    params = SAMPLING["temperature"] | {"max_tokens": 80}
    expected = plain(target, **params)
    with coordinating(
        partial(
            rehearsed, answers(expected), block_size=block_size, wrong=0.1, hits=0.8, delay_s=0.006
        )
    ) as coordinator:
        drafter = async_drafter(
            coordinator, draft_length=block_size, miss_policy=miss_policy, patience_s=0.003
        )
        runs = [
            run(target, drafter, prompt, draft_length=block_size, **params) for prompt in PROMPTS
        ]
    assert [one.ids for one in runs] == [one.ids for one in expected]
    assert {"late", "slow"} & {cause for one in runs for cause in causes(one)}, (
        "some answers must have come too late"
    )
    assert any(round_.num_accepted for one in runs for round_ in one.rounds)


def test_when_the_verdict_was_foreseen_in_time_every_round_is_a_hit(target: NativeTarget) -> None:
    expected = run(target, max_tokens=100)
    with coordinating(lambda: rehearsed([expected.token_ids], wrong=0.2)) as coordinator:
        one = run(
            Unhurried(target, coordinator),
            async_drafter(coordinator),
            max_tokens=100,
            draft_length=8,
        )
    assert one.ids == expected.ids
    assert readiness(one) == ["unprepared"] + ["hit"] * (len(readiness(one)) - 1)
    assert [prepared.fitted for prepared in preparations(one)] == [
        way == "hit" for way in readiness(one)
    ]
    assert causes(one) == []
    assert len(one.rounds) > 15


def test_after_a_miss_bonus_only_goes_on_without_a_draft_and_draft_now_with_one(
    target: NativeTarget,
) -> None:
    expected = run(target, max_tokens=60)
    for miss_policy in ("draft_now", "bonus_only"):
        with coordinating(lambda: rehearsed([expected.token_ids], hits=0.0)) as coordinator:
            one = run(
                Unhurried(target, coordinator),
                async_drafter(coordinator, miss_policy=miss_policy),
                max_tokens=60,
                draft_length=8,
            )
        assert one.ids == expected.ids
        assert set(readiness(one)) == {"unprepared", "miss"}
        assert not any(prepared.fitted for prepared in preparations(one))
        wanted = [round_ for round_ in one.rounds if round_.preparation is not None]
        drafted = [round_.draft_length > 0 for round_ in wanted]
        assert all(drafted) if miss_policy == "draft_now" else not any(drafted)
        assert set(causes(one)) == (set() if miss_policy == "draft_now" else {"miss", "unprepared"})


# Failure


@pytest.mark.slow
@pytest.mark.parametrize("restarts", [0, 100])
def test_a_worker_that_ends_at_any_round_costs_speed_only(
    restarts: int, target: NativeTarget
) -> None:
    expected = run(target, max_tokens=60, **SAMPLING["hot"])
    double = rehearsed([expected.token_ids], wrong=0.2)
    for at_round in range(12):
        with coordinating(lambda: double, restarts=restarts) as coordinator:
            drafter = async_drafter(coordinator)
            one = make(target, max_tokens=60, **SAMPLING["hot"])
            for _ in decode(target, drafter, [one]):
                if len(one.events) == at_round + 1 and coordinator.link.worker is not None:
                    coordinator.link.worker.kill()
            if restarts:  # a later request drafts again, and so did this one
                again = run(target, drafter, max_tokens=60, draft_length=8, **SAMPLING["hot"])
                assert sum(round_.num_accepted for round_ in again.rounds) > 20
        assert one.ids == expected.ids
        assert notes(one) == ["the draft thread died"]
        assert set(causes(one)) <= {"dead"}
        if not restarts:
            assert all(round_.draft_length == 0 for round_ in one.rounds[at_round + 1 :])


def test_a_kill_at_every_round_costs_speed_only(target: NativeTarget) -> None:
    expected = run(target, max_tokens=80)
    double = rehearsed([expected.token_ids], wrong=0.3)
    with coordinating(lambda: double, restarts=1000) as coordinator:
        one = make(target, max_tokens=80)
        for _ in decode(target, async_drafter(coordinator), [one]):
            assert coordinator.link.worker is not None
            coordinator.link.worker.kill()
            coordinator.ensure_worker()
    assert one.ids == expected.ids
    assert len(notes(one)) >= len(one.rounds) - 1


def test_a_worker_that_raises_is_asked_again_and_at_last_no_more(target: NativeTarget) -> None:
    expected = run(target, max_tokens=120)
    with coordinating(
        lambda: rehearsed([expected.token_ids], wrong=0.4, raising=0.2)
    ) as coordinator:
        now_and_then = run(target, async_drafter(coordinator), max_tokens=120, draft_length=8)
    with coordinating(lambda: rehearsed([expected.token_ids], raising=1.0)) as coordinator:
        always = run(target, async_drafter(coordinator), max_tokens=120, draft_length=8)
    assert now_and_then.ids == always.ids == expected.ids
    assert sum(round_.num_accepted for round_ in now_and_then.rounds) > 30
    assert notes(always) == ["the draft worker failed: RuntimeError: told to fail"] * 3
    assert set(causes(always)) == {"failed"}


def test_a_worker_that_hangs_is_waited_for_once_and_then_replaced(target: NativeTarget) -> None:
    expected = run(target, max_tokens=150)
    makes = iter(
        [
            rehearsed([expected.token_ids], wrong=0.3, hangs_at=5),
            *[rehearsed([expected.token_ids], wrong=0.3)] * 3,
        ]
    )
    started = time.perf_counter()
    with coordinating(lambda: next(makes), restarts=1) as coordinator:
        hanging = coordinator.link.worker
        hanging.thread.may_stay = True  # type: ignore[union-attr]
        one = run(
            Slow(target, 0.01),
            async_drafter(coordinator, patience_s=0.2, hung_s=0.4),
            max_tokens=150,
            draft_length=8,
        )
    assert time.perf_counter() - started < 10
    assert one.ids == expected.ids
    assert notes(one) == ["the draft thread did not answer for 0.4 s and was ended"]
    assert causes(one).count("late") == 1
    assert {"slow", "hung"} <= set(causes(one))
    assert one.rounds[-2].draft_length > 0, "its successor drafts"


def test_a_fault_of_the_drafter_ends_its_drafting_and_is_told(target: NativeTarget) -> None:
    faulty_double = PreparingDouble(faulty(oracle(4, [])), foresees([]))
    with coordinating(lambda: faulty_double) as coordinator:
        one = run(target, async_drafter(coordinator), max_tokens=30, draft_length=4)
        assert len(coordinator._sequences) == 0
    assert one.ids == run(target, max_tokens=30).ids
    assert one.faults == ["told to be faulty"]
    assert causes(one) == ["fault"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_thousands_of_rounds_with_faults_of_every_kind(target: NativeTarget) -> None:
    rounds = 0
    seen: set[str] = set()
    for sampling in ("greedy", "everything"):
        params = SAMPLING[sampling] | {"max_tokens": 200}
        expected = plain(target, **params)
        with coordinating(_faulty_workers(answers(expected)), restarts=10_000) as coordinator:
            for miss_policy in ("draft_now", "bonus_only"):
                drafter = async_drafter(
                    coordinator, draft_length=4, miss_policy=miss_policy, patience_s=0.002
                )
                runs = [
                    run(target, drafter, prompt, draft_length=4, **params) for prompt in PROMPTS
                ]
                assert [one.ids for one in runs] == [one.ids for one in expected]
                for one in runs:
                    rounds += len(one.rounds)
                    seen |= {*readiness(one), *causes(one)}
            assert (len(coordinator._sequences), len(coordinator.cache)) == (0, 0)
    assert rounds > 1500
    assert seen >= {
        "hit",
        "unprepared",
        "dead",
        "failed",
    }  # which of the others come is a matter of the machine's speed


@pytest.mark.slow
def test_memory_is_flat_over_many_requests(target: NativeTarget) -> None:
    expected = run(target, max_tokens=12)
    held = []
    with coordinating(
        partial(rehearsed, [expected.token_ids], wrong=0.3, hits=0.7, raising=0.02)
    ) as coordinator:
        drafter = async_drafter(coordinator)
        tracemalloc.start()
        for _ in range(3):
            for _ in range(40):
                rounds = decode(target, drafter, [make(target, max_tokens=12)])
                next(rounds)
                next(rounds)
                rounds.close()  # every other request is given up
                run(target, drafter, max_tokens=12, draft_length=8)
            gc.collect()
            held.append(tracemalloc.get_traced_memory()[0])
        tracemalloc.stop()
    assert held[2] - held[1] < 20_000, held


def _faulty_workers(known: list[list[int]]) -> Callable[[], Preparer]:
    """Every worker has faults of its own."""
    seeds = itertools.count()

    def make_preparer() -> Preparer:
        return rehearsed(
            known, wrong=0.5, hits=0.7, delay_s=0.001, raising=0.02, crashing=0.02, seed=next(seeds)
        )

    return make_preparer


# Life cycle


def test_the_first_token_waits_for_no_draft(target: NativeTarget) -> None:
    expected = run(target, max_tokens=20)
    with coordinating(lambda: rehearsed([expected.token_ids], hangs_at=0)) as coordinator:
        coordinator.link.worker.thread.may_stay = True  # type: ignore[union-attr]
        rounds = decode(
            target, async_drafter(coordinator, patience_s=0.5), [make(target, max_tokens=20)]
        )
        started = time.perf_counter()
        next(rounds)
        assert time.perf_counter() - started < 0.3
        assert [token_id for round_ in rounds for token_id in round_.token_ids] == expected.ids[1:]


def test_late_results_of_an_aborted_request_are_dropped(target: NativeTarget) -> None:
    expected = plain(target, max_tokens=60)
    with coordinating(lambda: rehearsed(answers(expected), wrong=0.2, delay_s=0.01)) as coordinator:
        drafter = async_drafter(coordinator)
        for prompt in PROMPTS:
            rounds = decode(target, drafter, [make(target, prompt, max_tokens=60)])
            next(rounds)
            next(rounds)
            rounds.close()
        assert len(coordinator._sequences) == 0
        one = run(target, drafter, PROMPTS[0], max_tokens=60, draft_length=8)
        assert one.ids == expected[0].ids
        assert coordinator.cache.num_stale >= 1
        assert len(coordinator.cache) == 0


def test_two_interleaved_requests_do_not_meet(target: NativeTarget) -> None:
    expected = plain(target, max_tokens=60)
    with coordinating(lambda: rehearsed(answers(expected), wrong=0.2, hits=0.8)) as coordinator:
        drafter = async_drafter(coordinator)
        runs = six(target, max_tokens=60)
        going = [decode(target, drafter, [one]) for one in runs]
        while going:
            going = [rounds for rounds in going if next(rounds, None) is not None]
    assert [one.ids for one in runs] == [one.ids for one in expected]
    assert all(sum(round_.num_accepted for round_ in one.rounds) > 20 for one in runs)


def test_requests_of_several_threads_do_not_meet(target: NativeTarget) -> None:
    expected = plain(target, max_tokens=60)
    with coordinating(lambda: rehearsed(answers(expected), wrong=0.2, hits=0.8)) as coordinator:
        drafter = async_drafter(coordinator)
        runs = six(target, max_tokens=60)

        def decode_alone(one: Run) -> None:
            for _ in decode(NativeTarget(target.model), drafter, [one]):
                pass

        threads = [threading.Thread(target=decode_alone, args=(one,)) for one in runs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert len(coordinator._sequences) == 0
    assert [one.ids for one in runs] == [one.ids for one in expected]
