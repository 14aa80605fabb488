"""Batched decoding: requests do not affect each other, and a failing drafter costs only speed."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import pytest

from d3d.engine.drafter import NO_DRAFT, Draft, guarded
from d3d.engine.engine import Engine
from d3d.engine.request import Request
from d3d.engine.round import Round
from d3d.target.native import NativeTarget
from support.doubles import (
    Double,
    always_wrong,
    empty,
    failing,
    faulty,
    noisy,
    oracle,
    slow,
    wrong_at,
)
from support.runs import PROMPT, SAMPLING, Run, Watched, make, run, run_all

PROMPTS = [
    [(31 * index + 7 * place) % 97 for place in range(length)]
    for index, length in enumerate((1, 3, 40, 5, 17, 2, 9, 70))
]
LIMITS = (12, 1, 30, 7, 25, 2, 19, 3)
WAYS = (
    "greedy",
    "hot",
    "temperature",
    "top_k",
    "greedy penalties",
    "greedy",
    "sampled penalties",
    "bias",
)


def eight(target: NativeTarget, **extra: Any) -> list[Run]:
    return [
        make(target, prompt, **{**SAMPLING[way], "max_tokens": limit, **extra})
        for prompt, limit, way in zip(PROMPTS, LIMITS, WAYS, strict=True)
    ]


def alone(target: NativeTarget) -> list[Run]:
    return [run_all(target, None, [one])[0] for one in eight(target)]


def mixed(solo: list[Run], vocab_size: int, block_size: int) -> Double:
    """Another double for each of the eight."""
    answers = [one.token_ids for one in solo]
    right = oracle(block_size, answers)
    kinds = [
        right,
        right,
        noisy(0.3, 1, block_size, answers, vocab_size),
        always_wrong(block_size, answers, vocab_size),
        empty(right, every=2),
        right,
        wrong_at(1, block_size, answers, vocab_size),
        empty(right, every=1),
    ]
    by_prompt = {tuple(prompt): kind for prompt, kind in zip(PROMPTS, kinds, strict=True)}

    def propose(request: Request, length: int, number: int) -> Draft:
        prompt = tuple(request.token_ids[: request.prompt_length])
        return by_prompt[prompt].make_draft(request, length, number)

    return Double(block_size, propose)


@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_each_of_eight_equals_its_solo_run(target: NativeTarget, block_size: int) -> None:
    solo = alone(target)
    for drafter in (None, mixed(solo, target.vocab_size, block_size)):
        watched = Watched(target)
        together = run_all(watched, drafter, eight(target), block_size)
        assert [one.ids for one in together] == [one.ids for one in solo]
        assert [one.finish_reason for one in together] == [one.finish_reason for one in solo]
        assert not any(one.faults for one in together)


@pytest.mark.parametrize("block_size", [1, 4])
def test_each_is_drafted_for_as_if_alone(target: NativeTarget, block_size: int) -> None:
    solo = alone(target)
    answers = [one.token_ids for one in solo]
    drafter = noisy(0.3, 1, block_size, answers, target.vocab_size)
    together = run_all(target, drafter, eight(target), block_size)
    for one, single in zip(together, eight(target), strict=True):
        run_all(target, drafter, [single], block_size)
        assert [stats[:3] for stats in one.rounds] == [stats[:3] for stats in single.rounds]


def test_requests_leave_as_they_end(target: NativeTarget) -> None:
    watched = Watched(target)
    together = run_all(watched, None, eight(target))
    assert [len(batch) for batch in watched.fed] == [
        sum(limit > done for limit in LIMITS) for done in range(1, max(LIMITS))
    ]
    by_limit = sorted(zip(LIMITS, (one.request.id for one in together), strict=True))
    assert watched.ended == [request_id for _, request_id in by_limit]
    assert all(len(one.events) == len(one.ids) for one in together), (
        "nothing is told of those that have left"
    )


def test_the_cache_holds_each_sequence_but_its_anchor(target: NativeTarget) -> None:
    solo = alone(target)
    watched = Watched(target)
    runs = eight(target)
    engine = Engine(watched, mixed(solo, target.vocab_size, 4))
    by_id = {one.request.id: one.request for one in runs}
    for request in by_id.values():
        engine.add(request)
    while engine.has_work:
        drafted = [round_.request_id for round_ in engine.step() if round_.number]
        if drafted:
            assert watched.lengths[-1] == [len(by_id[request_id]) - 1 for request_id in drafted]
        going = {i: request for i, request in by_id.items() if not request.finished}
        cached = dict(zip(target.cache.ids, target.cache.lengths, strict=True))
        assert cached == {i: len(request) - 1 for i, request in going.items()}
    assert len(watched.lengths) > 8
    assert target.num_held == 0


def test_seeded_and_greedy_requests_do_not_mix(target: NativeTarget) -> None:
    def requests() -> list[Run]:
        ways = [{"temperature": 2.0, "seed": seed} for seed in (1, 42, 43)]
        return [
            make(target, **{**way, "max_tokens": 25})
            for way in (*ways, {}, {"temperature": 2.0, "seed": 42})
        ]

    solo = [run_all(target, None, [one])[0].ids for one in requests()]
    assert len({tuple(ids) for ids in solo}) == 4
    answers = [PROMPT + ids for ids in solo]
    for drafter in (None, oracle(4, answers), noisy(0.4, 1, 4, answers, target.vocab_size)):
        together = run_all(target, drafter, requests(), 4)
        assert [one.ids for one in together] == solo


def test_the_same_requests_in_another_order(target: NativeTarget) -> None:
    solo = alone(target)
    order = [6, 2, 7, 0, 5, 1, 4, 3]
    runs = eight(target)
    together = run_all(
        target, mixed(solo, target.vocab_size, 4), [runs[index] for index in order], 4
    )
    assert [one.ids for one in together] == [solo[index].ids for index in order]


@pytest.mark.parametrize("at_draft", range(8))
def test_a_drafter_that_raises_is_not_asked_again(target: NativeTarget, at_draft: int) -> None:
    solo = alone(target)
    drafter = failing(
        noisy(0.5, 3, 4, [one.token_ids for one in solo], target.vocab_size), at_draft
    )
    together = run_all(target, drafter, eight(target), 4)
    assert [one.ids for one in together] == [one.ids for one in solo]
    for one in together:
        went_on = len(one.rounds) > at_draft
        if one.faults:
            assert went_on
            assert one.faults == [
                f"the drafter failed: RuntimeError: told to fail in draft {at_draft}"
            ]
            assert [stats.draft_length for stats in one.rounds[at_draft:]] == [0] * (
                len(one.rounds) - at_draft
            )
    assert any(one.faults for one in together)


class Unreliable(Double):
    """A drafter that breaks the contract in the way that it is told."""

    def __init__(self, way: str) -> None:
        super().__init__(4, lambda _, length, __: Draft((1,) * length))
        self.way = way

    def _raise(self, when: str) -> None:
        if self.way == f"{when} raises":
            raise MemoryError("no room")

    def propose(self, requests: Sequence[Request]) -> list[Draft]:
        self._raise("propose")
        return super().propose(requests)[: 2 if self.way == "too few drafts" else None]

    def prefilled(self, seconds: float, num_tokens: int) -> None:
        self._raise("prefilled")

    def observe(self, rounds: Sequence[Round]) -> None:
        self._raise("observe")

    def suspend(self, request: Request) -> None:
        self._raise("suspend")

    def end(self, request: Request) -> None:
        super().end(request)
        self._raise("end")


@pytest.mark.parametrize(
    ("way", "costs_drafts"),
    [
        ("propose raises", True),
        ("too few drafts", True),
        ("prefilled raises", False),
        ("observe raises", False),
        ("suspend raises", False),
        ("end raises", False),
    ],
)
def test_a_drafter_that_breaks_costs_no_answer(
    target: NativeTarget, way: str, costs_drafts: bool
) -> None:
    together = run_all(target, Unreliable(way), eight(target), 4)
    assert [one.ids for one in together] == [one.ids for one in alone(target)]
    assert all(len(one.faults) <= 1 for one in together)
    assert any(one.faults for one in together) == costs_drafts
    assert any(stats.draft_length for one in together for stats in one.rounds) != costs_drafts


@pytest.mark.parametrize("at_draft", range(4))
def test_a_fault_ends_drafting_for_its_own_request_only(
    target: NativeTarget, at_draft: int
) -> None:
    solo = alone(target)
    right = oracle(2, [one.token_ids for one in solo])
    broken = faulty(right, at_draft)

    def propose(request: Request, length: int, number: int) -> Draft:
        one = broken if request.prompt_length == 40 else right
        return one.make_draft(request, length, number)

    together = run_all(target, Double(2, propose), eight(target), 2)
    assert [one.ids for one in together] == [one.ids for one in solo]
    for index, one in enumerate(together):
        if index == 2:
            assert one.faults == ["told to be faulty"]
            assert [stats.draft_length for stats in one.rounds] == [2] * at_draft + [0] * (
                29 - 3 * at_draft
            )
        else:
            assert one.faults == []
            assert [stats.draft_length for stats in one.rounds[:-1]] == [2] * (len(one.rounds) - 1)


@pytest.mark.parametrize("sampling", ["greedy", "temperature"])
@pytest.mark.parametrize("at_draft", range(3))
def test_a_faulty_block_changes_no_answer(
    target: NativeTarget, at_draft: int, sampling: str
) -> None:
    params = SAMPLING[sampling] | {"max_tokens": 20}
    plain = run(target, **params)
    drafted = run(target, faulty(oracle(4, [plain.token_ids]), at_draft), **params)
    assert drafted.ids == plain.ids
    assert [event.fault for event in drafted.events] == [None] * (at_draft + 1) + [
        "told to be faulty"
    ] + [None] * (18 - 5 * at_draft)


def test_a_slow_drafter_shows_in_its_own_time(target: NativeTarget) -> None:
    plain = run(target, max_tokens=8)
    started = time.perf_counter()
    drafted = run(target, slow(oracle(4, [plain.token_ids]), 0.05), max_tokens=8)
    assert drafted.ids == plain.ids
    assert all(stats.t_draft >= 0.05 for stats in drafted.rounds if stats.draft_length)
    assert (
        sum(stats.t_draft + stats.t_verify for stats in drafted.rounds)
        <= time.perf_counter() - started
    )


def test_lengths_asked_for_are_never_negative(target: NativeTarget) -> None:
    seen: list[int] = []

    def propose(_: Request, length: int, __: int) -> Draft:
        seen.append(length)
        return Draft((1,) * length)

    run_all(target, Double(4, propose), eight(target), 4)
    assert min(seen) == 0
    assert max(seen) == 4


def test_no_requests_are_no_work(target: NativeTarget) -> None:
    watched = Watched(target)
    assert run_all(watched, None, []) == []
    assert watched.fed == []


def test_a_faulty_request_is_told_once_and_forgotten_when_it_ends(target: NativeTarget) -> None:
    inner = faulty(oracle(4, []))
    drafter = guarded(inner, target.vocab_size)
    request = make(target, max_tokens=20).request
    assert [draft.fault for draft in drafter.propose([request])] == ["told to be faulty"]
    assert drafter.propose([request]) == [NO_DRAFT]
    assert inner.num_drafts == 1, "it is not asked for a request that is not drafted for"
    assert drafter.num_held == 2
    drafter.end(request)
    assert drafter.num_held == 0
