"""One scenario for each fault; `make soak` runs thousands of rounds of them, in processes too."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from support.orphans import seconds_until_gone
from support.soak import (
    BLOCK_SIZES,
    BUDGETS,
    FAULTS,
    IN_THREADS,
    PROCESS_EVERY,
    Going,
    Tally,
    first_with,
    plain,
    play,
    scenario,
)

INJECTED = {
    "delays": "delay",
    "slow": "slow",
    "raises": "raise",
    "out of memory": "out of memory",
    "crashes": "crash",
    "killed": "kill",
    "restarted": "kill",
}
"""Faults that are likely enough to come in any short scenario."""


@pytest.mark.parametrize("fault", IN_THREADS)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_whatever_befalls_the_worker_the_answers_are_the_targets(fault: str) -> None:
    tally = Tally()
    play(replace(first_with(fault), drafter="noisy", block_size=4), tally, max_tokens=40)
    assert tally.failures == []
    assert tally.requests == 4
    assert tally.all_rounds > 10 or fault == "aborted"
    if fault in INJECTED:
        assert tally.faults[INJECTED[fault]] > 0


def test_an_answer_that_is_not_the_targets_would_be_noticed() -> None:
    tally = Tally()
    going = Going(first_with("none"), tally, None, 40)  # type: ignore[arg-type]
    right, other = plain(going.one.sampling, 40), plain("hot", 40)
    going.look_at(list(right))
    assert tally.failures == []
    going.look_at([right[0], other[1], *right[2:]])
    assert len(tally.failures) == 1
    assert "ids differ" in tally.failures[0]


def test_a_lap_has_every_fault_with_every_block_size_policy_and_way_of_sampling() -> None:
    lap = [one for one in map(scenario, range(240)) if one.placement == "thread"]
    wanted = set(
        itertools.product(
            IN_THREADS, BLOCK_SIZES, ("draft_now", "bonus_only"), ("greedy", "everything")
        )
    )
    assert {(one.fault, one.block_size, one.miss_policy, one.sampling) for one in lap} == wanted
    assert {one.outcome_budget for one in lap} == set(BUDGETS)
    separate = map(scenario, range(PROCESS_EVERY - 1, PROCESS_EVERY * len(FAULTS), PROCESS_EVERY))
    assert {(one.fault, one.placement) for one in separate} == {
        (fault, "processes") for fault in FAULTS
    }


@pytest.mark.slow
def test_a_worker_at_work_is_gone_soon_after_its_parent_was_killed() -> None:
    assert seconds_until_gone() < 5
