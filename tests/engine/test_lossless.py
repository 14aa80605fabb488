"""Whatever is drafted, the answer is the target's own: ids, log-probabilities, and the state
between rounds."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from d3d.engine.drafter import Draft
from d3d.engine.engine import Engine
from d3d.engine.request import Request
from d3d.target.native import NativeTarget
from support.doubles import Double, always_wrong, empty, noisy, oracle, scripted, wrong_at
from support.runs import PROMPT, SAMPLING, Run, Watched, make, rounds_of, run, run_all

BLOCK_SIZES = (1, 2, 4, 16)
MAX_TOKENS = 30


def doubles(plain: Run, vocab_size: int, block_size: int) -> dict[str, Double]:
    """Each kind, for this answer."""
    answers = [plain.token_ids]
    wrong = {
        f"wrong at {index}": wrong_at(index, block_size, answers, vocab_size)
        for index in range(block_size)
    }
    return wrong | {
        "oracle": oracle(block_size, answers),
        "always wrong": always_wrong(block_size, answers, vocab_size),
        "noisy": noisy(0.3, 11, block_size, answers, vocab_size),
        "empty now and then": empty(noisy(0.2, 12, block_size, answers, vocab_size), every=3),
    }


@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_ids_equal_plain_at_every_rejection_position(
    target: NativeTarget, block_size: int, sampling: str
) -> None:
    params = SAMPLING[sampling] | {"max_tokens": MAX_TOKENS}
    plain = run(target, **params)
    assert len(plain.ids) == MAX_TOKENS
    for name, drafter in doubles(plain, target.vocab_size, block_size).items():
        drafted = run(target, drafter, **params)
        assert drafted.ids == plain.ids, name
        accepted = [
            stats.num_accepted for stats in drafted.rounds[:-1]
        ]  # the limit may cut the last
        if name == "oracle":
            assert set(accepted) <= {block_size}
        elif name.startswith("wrong at"):
            assert set(accepted) <= {int(name.split()[-1])}
        elif name == "always wrong":
            assert set(accepted) == {0}


def test_plain_equals_computing_everything_anew_for_each_token(target: NativeTarget) -> None:
    ids = list(PROMPT)
    for _ in range(MAX_TOKENS):
        (logits,) = target.forward([-1], [ids])
        target.cache.end(-1)
        ids.append(logits.argmax()[-1])
    assert run(target, max_tokens=MAX_TOKENS).token_ids == ids
    assert len(set(ids)) > 10, "a target that repeats itself would prove little"


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_other_families_too(make_target: Any, family: str) -> None:
    target = make_target(family=family)
    plain = run(target, max_tokens=MAX_TOKENS)
    for drafter in doubles(plain, target.vocab_size, 4).values():
        assert run(target, drafter, max_tokens=MAX_TOKENS).ids == plain.ids


def test_the_draft_length_changes_nothing(target: NativeTarget) -> None:
    plain = run(target, max_tokens=MAX_TOKENS)
    for draft_length in (0, 1, 2, 3, 4, 5, 15, 16, 17, 100):
        drafter = noisy(0.2, 1, 16, [plain.token_ids], target.vocab_size)
        drafted = run(target, drafter, draft_length=draft_length, max_tokens=MAX_TOKENS)
        assert drafted.ids == plain.ids
        assert max(stats.draft_length for stats in drafted.rounds) == min(draft_length, 16)


@pytest.mark.parametrize("options", [{"max_batch": 0}, {"max_batch": -1}, {"prefill_rows": 0}])
def test_impossible_numbers_are_refused(target: NativeTarget, options: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="max_batch and prefill_rows must be 1 or more, got"):
        Engine(target, **options)


@pytest.mark.parametrize("sampling", SAMPLING)
def test_logprobs_equal_plain(target: NativeTarget, sampling: str) -> None:
    params = SAMPLING[sampling] | {"max_tokens": MAX_TOKENS, "logprobs": 3}
    plain = run(target, **params)
    assert len({round(entry.logprob, 3) for entry in plain.logprobs}) > 5
    for name, drafter in doubles(plain, target.vocab_size, 4).items():
        drafted = run(target, drafter, **params)
        assert [entry.token_id for entry in drafted.logprobs] == drafted.ids == plain.ids, name
        for mine, theirs in zip(drafted.logprobs, plain.logprobs, strict=True):
            assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-4)
            assert dict(mine.top) == pytest.approx(dict(theirs.top), abs=1e-4)
            assert mine.token_id in dict(mine.top)


@pytest.mark.parametrize("sampling", ["greedy", "temperature"])
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_after_every_round_the_cache_holds_the_committed_tokens_but_the_anchor(
    target: NativeTarget, block_size: int, sampling: str
) -> None:
    params = SAMPLING[sampling] | {"max_tokens": MAX_TOKENS}
    plain = run(target, **params)
    for drafter in doubles(plain, target.vocab_size, block_size).values():
        watched = Watched(target)
        made = make(target, **params)
        committed, cached = [], []
        for round_ in rounds_of(watched, drafter, [made], block_size):
            if round_.number:
                committed.append(len(made.request))
            if not made.request.finished:
                cached.append(target.cache.length(made.request.id))
        assert watched.lengths == [[length - 1] for length in committed]
        assert cached == [len(PROMPT), *(length - 1 for length in committed[:-1])]


def test_the_first_drafted_token_is_checked_too(target: NativeTarget) -> None:
    right = run(target, prompt=[1, 1, 1], max_tokens=2).ids
    wrong = (right[1] + 1) % target.vocab_size
    drafted = run(target, scripted(1, [[wrong]]), [1, 1, 1], max_tokens=3)
    assert drafted.rounds[0].num_accepted == 0
    assert drafted.rounds[0].draft_length == 1
    assert drafted.ids[:2] == right


def test_what_is_right_behind_a_wrong_token_does_not_count(target: NativeTarget) -> None:
    ids = run(target, max_tokens=6).ids
    wrong = (ids[2] + 1) % target.vocab_size
    drafted = run(target, scripted(4, [[ids[1], wrong, ids[3], ids[4]]]), max_tokens=6)
    assert (
        drafted.rounds[0].draft_length,
        drafted.rounds[0].num_accepted,
        drafted.rounds[0].num_committed,
    ) == (4, 1, 2)
    assert drafted.ids == ids


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_counts_hold_every_committed_token_after_each_round(
    target: NativeTarget, block_size: int
) -> None:
    params = {"frequency_penalty": -0.6, "max_tokens": MAX_TOKENS}
    plain = run(target, **params)
    assert max(Counter(plain.ids).values()) > 2
    for drafter in (
        oracle(block_size, [plain.token_ids]),
        noisy(0.4, 5, block_size, [plain.token_ids], target.vocab_size),
    ):
        request = (made := make(target, **params)).request
        for _ in rounds_of(target, drafter, [made], block_size):
            assert request.counts is not None
            expected = torch.bincount(torch.tensor(request.answer_ids), minlength=target.vocab_size)
            assert torch.equal(request.counts.answer, expected.int())
        assert request.answer_ids == plain.ids


def test_a_penalty_changes_the_answer(target: NativeTarget) -> None:
    answers = {
        penalty: tuple(run(target, frequency_penalty=penalty, max_tokens=MAX_TOKENS).ids)
        for penalty in (-2.0, 0.0, 2.0)
    }
    assert len(set(answers.values())) == 3


@pytest.mark.parametrize("name", ["oracle", "always wrong", "wrong at 2"])
def test_a_bias_acts_at_every_position(target: NativeTarget, name: str) -> None:
    for bias, holds in ((100.0, lambda ids: set(ids) == {5}), (-100.0, lambda ids: 5 not in ids)):
        params = {"logit_bias": {5: bias}, "temperature": 1.0, "seed": 1, "max_tokens": MAX_TOKENS}
        plain = run(target, **params)
        drafted = run(target, doubles(plain, target.vocab_size, 4)[name], **params)
        assert drafted.ids == plain.ids
        assert holds(drafted.ids)


def test_min_p_of_one_is_greedy(target: NativeTarget) -> None:
    plain = run(target, max_tokens=MAX_TOKENS)
    params = {"temperature": 1.0, "min_p": 1.0, "seed": 3, "max_tokens": MAX_TOKENS}
    assert (
        run(target, **params).ids
        == run(target, oracle(4, [plain.token_ids]), **params).ids
        == plain.ids
    )


def test_a_temperature_is_really_sampled(target: NativeTarget) -> None:
    greedy = run(target, max_tokens=MAX_TOKENS)
    sampled = [
        run(
            target, oracle(4, [greedy.token_ids]), temperature=0.6, seed=seed, max_tokens=MAX_TOKENS
        ).ids
        for seed in (1, 2, 1)
    ]
    assert sampled[0] == sampled[2] != sampled[1]
    assert greedy.ids not in sampled


def test_without_a_seed_two_answers_differ(target: NativeTarget) -> None:
    assert (
        run(target, temperature=1.0, max_tokens=MAX_TOKENS).ids
        != run(target, temperature=1.0, max_tokens=MAX_TOKENS).ids
    )


def test_a_second_request_on_the_same_engine_starts_from_nothing(make_target: Any) -> None:
    used = make_target()
    long = run(used, max_tokens=60)
    drafter = noisy(0.3, 1, 8, [long.token_ids], used.vocab_size)
    assert run(used, drafter, max_tokens=60).ids == long.ids
    for prompt in ([3, 9], PROMPT, PROMPT):
        assert (
            run(used, drafter, prompt, max_tokens=20).ids
            == run(make_target(), prompt=prompt, max_tokens=20).ids
        )


@pytest.mark.parametrize("bad", [-1, 97, 10**9])
@pytest.mark.parametrize("place", [0, 2])
def test_an_id_that_the_target_does_not_know_never_reaches_it(
    target: NativeTarget, bad: int, place: int
) -> None:
    assert target.vocab_size == 97
    plain = run(target, max_tokens=MAX_TOKENS)
    right = oracle(4, [plain.token_ids])

    def propose(request: Request, length: int, number: int) -> Draft:
        block = list(right.make_draft(request, length, number).token_ids)
        if number == 2:
            block[place] = bad
        return Draft(tuple(block))

    watched = Watched(target)
    drafted = run(watched, Double(4, propose), draft_length=4, max_tokens=MAX_TOKENS)
    assert drafted.ids == plain.ids
    assert len(drafted.faults) == 1
    assert "97" in drafted.faults[0]
    assert all(0 <= token_id < 97 for batch in watched.fed for ids in batch for token_id in ids)
    assert [stats.draft_length for stats in drafted.rounds[:4]] == [4, 4, 0, 0]


def test_a_block_longer_than_asked_for_is_cut(target: NativeTarget) -> None:
    plain = run(target, max_tokens=12)
    answer = plain.ids
    drafted = run(target, scripted(4, [answer[1:]]), draft_length=3, max_tokens=12)
    assert drafted.ids == plain.ids
    assert (drafted.rounds[0].draft_length, drafted.rounds[0].num_accepted) == (3, 3)


def test_statistics_count_what_happened(target: NativeTarget) -> None:
    plain = run(target, max_tokens=MAX_TOKENS)
    for drafter in doubles(plain, target.vocab_size, 4).values():
        watched = Watched(target)
        drafted = run_all(watched, drafter, [make(target, max_tokens=MAX_TOKENS)], 4)[0]
        rounds = drafted.rounds
        assert [event.number for event in drafted.events] == list(range(len(drafted.events)))
        assert drafted.events[0].draft_length == 0
        assert len(rounds) == len(drafted.events) - 1 == len(watched.fed), (
            "one verification a round, none for the first token"
        )
        assert [stats.draft_length for stats in rounds] == [len(ids[0]) - 1 for ids in watched.fed]
        assert [stats.num_committed for stats in rounds] == [
            len(event.token_ids) for event in drafted.events[1:]
        ]
        assert [token for event in drafted.events for token in event.token_ids] == drafted.ids
        assert all(stats.num_committed == stats.num_accepted + 1 for stats in rounds[:-1])
        assert sum(stats.num_committed for stats in rounds) == len(drafted.ids) - 1
        assert all(stats.t_draft >= 0 and stats.t_verify > 0 for stats in rounds)


def test_the_first_token_waits_for_no_drafter(target: NativeTarget) -> None:
    def fail(*_: Any) -> Draft:
        raise RuntimeError("no memory")

    events = rounds_of(target, Double(4, fail), [make(target, max_tokens=5)])
    assert next(events).fault is None
    faults = [event.fault for event in events]
    assert faults[0] is not None
    assert "no memory" in faults[0]
    assert faults[1:] == [None, None, None]
