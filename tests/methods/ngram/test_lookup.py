"""Prompt lookup proposes what followed the latest earlier occurrence."""

from __future__ import annotations

import random

import pytest

from d3d.methods.ngram.drafter import NgramDrafter
from d3d.methods.ngram.lookup import LONGEST_RUN, PromptLookup
from d3d.target.native import NativeTarget
from support.drafters import grow, request
from support.runs import PROMPT, make, run, run_all
from support.tiny import tiny_transformer


def proposed(token_ids: list[int], length: int = 4, **options: int) -> tuple[int, ...]:
    (draft,) = NgramDrafter(length, **options).propose([request(token_ids)])
    assert draft.fault is None
    assert draft.looked_up == bool(draft.token_ids)
    return draft.token_ids


def test_what_followed_the_same_tokens_is_proposed() -> None:
    assert proposed([1, 2, 3, 4, 5, 6, 9, 1, 2, 3]) == (4, 5, 6, 9)
    assert proposed([1, 2, 3, 4, 5, 6, 9, 1, 2, 3], length=2) == (4, 5)
    (cut,) = NgramDrafter(4).propose([request([1, 2, 3, 4, 5, 6, 9, 1, 2, 3], room=3)])
    assert cut.token_ids == (4, 5, 6)


def test_a_long_match_is_better_than_a_recent_one_and_a_recent_one_than_an_old_one() -> None:
    assert proposed([7, 8, 1, 50, 9, 1, 60, 7, 8, 1], length=1) == (50,)
    assert proposed([1, 50, 2, 1, 60, 3, 1], length=1) == (60,)
    assert proposed([7, 8, 1, 50, 9, 1, 60, 7, 8, 1], length=1, longest=1) == (60,)


def test_nothing_is_proposed_where_nothing_matches() -> None:
    assert proposed([1, 2, 3, 4]) == ()
    assert proposed([5]) == ()
    assert proposed([1, 2, 3, 9, 3], longest=3, shortest=2) == ()


def test_what_repeats_is_taken_to_go_on_repeating() -> None:
    assert proposed([4, 4, 4]) == (4, 4, 4, 4)
    assert PromptLookup(1).copy([4, 4, 4], 5) == (4, 4, 4, 4, 4)
    assert PromptLookup(2).copy([1, 2, 3, 1, 2], 7) == (3, 1, 2, 3, 1, 2, 3)
    assert PromptLookup(1).copy([1, 2, 3], 0) == ()
    assert PromptLookup(1).copy([1, 2, 1], 0) == ()


def test_what_may_follow_is_followed_in_turn() -> None:
    past = PromptLookup(2)
    assert past.copy([1, 2, 3, 9, 4, 5, 1], 3, ahead=(2, 3)) == (9, 4, 5)
    assert past.copy([1, 2, 3, 9, 4, 5, 1], 3) == ()
    assert past.copy([1, 2, 3, 9, 4, 5, 1], 3, ahead=(7, 8)) == ()
    assert past.copy([1, 2, 3, 9, 4, 5, 1, 2], 2) == (3, 9), "what was only ahead is not remembered"


def test_shorter_runs_than_asked_for_are_not_looked_for_and_no_longer_ones_than_help() -> None:
    assert PromptLookup(2).copy([1, 2, 3, 4, 5, 1, 2], 2) == (3, 4)
    assert PromptLookup(3).copy([1, 2, 3, 4, 5, 1, 2], 2) == ()
    run_ = list(range(20, 20 + LONGEST_RUN))
    past = [1, *run_, 50, 2, *run_, 60, 1, *run_]
    assert PromptLookup(1).copy(past, 1) == (60,), "the ninth token does not count"
    assert PromptLookup(1, LONGEST_RUN + 1).copy(past, 1) == (50,)
    assert PromptLookup(LONGEST_RUN + 1).copy(past, 1) == (50,), "the shortest is looked for, too"


def test_a_growing_text_is_indexed_once() -> None:
    draw = random.Random(1)
    text = [draw.randrange(5) for _ in range(200)]
    growing = PromptLookup(1, 4)
    for length in range(1, len(text)):
        assert growing.copy(text[:length], 6) == PromptLookup(1, 4).copy(text[:length], 6)


def test_each_request_has_a_past_of_its_own_until_it_ends() -> None:
    drafter = NgramDrafter(3)
    one, two = request([1, 2, 3]), request([5, 6, 5])
    assert [draft.token_ids for draft in drafter.propose([one, two])] == [(), (6, 5, 6)]
    grow(two, [6, 7])
    drafter.end(one)
    assert drafter.num_held == 1
    (draft,) = drafter.propose([two])
    assert draft.token_ids == ()
    grow(two, [5])
    three = request([9, 9])
    assert [draft.token_ids for draft in drafter.propose([three, two])] == [(9, 9, 9), (6, 7, 5)]
    drafter.end(two)
    drafter.end(two)
    drafter.end(three)
    assert drafter.num_held == 0


def test_answers_are_the_plain_ones_and_some_drafts_are_kept() -> None:
    engine = NativeTarget(tiny_transformer(scale=0.3))
    prompt = PROMPT * 4
    plain = run(engine, prompt=prompt, max_tokens=40)
    looked_up = run(engine, NgramDrafter(6), prompt, max_tokens=40)
    assert looked_up.ids == plain.ids
    assert sum(stats.num_accepted for stats in looked_up.rounds) > 0
    batch = run_all(engine, NgramDrafter(6), [make(engine, prompt, max_tokens=n) for n in (5, 30)])
    assert [one.ids for one in batch] == [plain.ids[:5], plain.ids[:30]]


@pytest.mark.parametrize(("shortest", "longest"), [(0, 3), (4, 3)])
def test_impossible_lengths_are_refused(shortest: int, longest: int) -> None:
    with pytest.raises(ValueError, match="shortest"):
        NgramDrafter(6, shortest, longest)


def test_an_impossible_shortest_run_is_refused() -> None:
    with pytest.raises(ValueError, match="shortest must be 1 or more, got 0"):
        PromptLookup(0)
