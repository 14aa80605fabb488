"""Tests of the test doubles that the decoding tests rely on."""

from __future__ import annotations

import time

import pytest

from d3d.engine.drafter import Draft, Drafter
from support.doubles import (
    Double,
    always_wrong,
    empty,
    failing,
    faulty,
    noisy,
    oracle,
    scripted,
    slow,
    wrong_at,
)
from support.drafters import request

VOCAB = 10
ANSWER = [1, 2, 3, 9, 5, 6, 7, 8, 9, 0, 1, 2]


def ask(
    drafter: Drafter,
    length: int = 4,
    committed: int = 2,
    *,
    drafts: int = 1,
    answer: list[int] = ANSWER,
) -> list[tuple[int, ...]]:
    """The tokens of several drafts for one request, nothing committed in between."""
    one = request(answer[:committed], room=length)
    return [drafter.propose([one])[0].token_ids for _ in range(drafts)]


def test_the_oracle_goes_on_as_the_answer_does() -> None:
    assert ask(oracle(4, [ANSWER])) == [(3, 9, 5, 6)]
    assert ask(oracle(4, [ANSWER]), length=2) == [(3, 9)]
    assert ask(oracle(4, [ANSWER]), length=9) == [(3, 9, 5, 6)]
    assert ask(oracle(4, [ANSWER]), committed=10) == [(1, 2)]
    assert ask(oracle(4, [ANSWER]), length=0) == [()]


def test_the_oracle_tells_answers_apart_by_what_is_committed() -> None:
    other = [1, 2, 4, 4, 4]
    drafter = oracle(2, [ANSWER, other])
    assert ask(drafter, committed=3, answer=other) == [(4, 4)]
    assert ask(drafter, committed=3) == [(9, 5)]
    assert ask(drafter, answer=[7, 7]) == [()]


@pytest.mark.parametrize("index", range(4))
def test_one_place_of_every_block_is_wrong(index: int) -> None:
    (block,) = ask(wrong_at(index, 4, [ANSWER], VOCAB))
    assert [place for place in range(4) if block[place] != ANSWER[2 + place]] == [index]
    assert all(0 <= token < VOCAB for token in block)


def test_always_wrong_is_wrong_everywhere_and_within_the_vocabulary() -> None:
    assert ask(always_wrong(4, [ANSWER], VOCAB)) == [(4, 0, 6, 7)]


def test_noise_hangs_on_seed_and_position() -> None:
    answer = [index % VOCAB for index in range(1000)]
    wrong = {}
    for seed in (1, 2):
        drafter = noisy(0.3, seed, 1000, [answer], VOCAB)
        (block,) = ask(drafter, length=999, committed=1, answer=answer)
        wrong[seed] = {1 + place for place, token in enumerate(block) if token != answer[1 + place]}
        assert 240 < len(wrong[seed]) < 360
        (again,) = ask(drafter, length=10, committed=500, answer=answer)
        assert {
            500 + place for place, token in enumerate(again) if token != answer[500 + place]
        } == wrong[seed] & set(range(500, 510))
    assert wrong[1] != wrong[2]


def test_a_script_is_read_once() -> None:
    drafter = scripted(4, [[1, 2], [], [3] * 9])
    assert ask(drafter, drafts=5) == [(1, 2), (), (3,) * 9, (), ()]
    assert ask(drafter) == [()]


def test_empty_now_and_then() -> None:
    assert ask(empty(oracle(2, [ANSWER])), drafts=4) == [(), (3, 9), (), (3, 9)]
    assert ask(empty(oracle(2, [ANSWER]), every=3), drafts=4) == [(), (3, 9), (3, 9), ()]


def test_failing_goes_on_failing() -> None:
    drafter = failing(oracle(2, [ANSWER]), at_draft=1)
    one = request(ANSWER[:2])
    assert drafter.propose([one]) == [Draft((3, 9))]
    for _ in range(2):
        with pytest.raises(RuntimeError, match="draft 1"):
            drafter.propose([one])


def test_faulty_reports_one_fault() -> None:
    drafter = faulty(oracle(2, [ANSWER]), at_draft=1)
    one = request(ANSWER[:2])
    assert [drafter.propose([one])[0].fault is not None for _ in range(3)] == [False, True, False]


def test_slow_takes_its_time() -> None:
    started = time.perf_counter()
    assert ask(slow(oracle(2, [ANSWER]), 0.03)) == [(3, 9)]
    assert time.perf_counter() - started >= 0.03


def test_a_double_holds_every_request_that_it_has_seen_until_it_ends() -> None:
    drafter = oracle(2, [ANSWER])
    first, second = request(ANSWER[:2]), request(ANSWER[:3])
    assert len(drafter.propose([first, second])) == 2
    drafter.propose([first])
    assert drafter.held == {first.id, second.id}
    drafter.end(first)
    drafter.end(first)
    assert drafter.held == {second.id}
    drafter.end(request(ANSWER))
    assert drafter.num_held == 1


def test_a_double_of_ones_own() -> None:
    assert ask(
        Double(3, lambda request, length, number: Draft((number,) * length)),
        length=9,
        drafts=2,
    ) == [(0,) * 3, (1,) * 3]
