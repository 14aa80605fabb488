"""Prompt lookup proposes what followed the last time."""

from __future__ import annotations

import pytest

from d3d.methods.ngram.drafter import NgramDrafter
from d3d.target.native import NativeTarget
from support.runs import PROMPT, make, run, run_all
from support.tiny import tiny_transformer


def proposed(token_ids: list[int], length: int = 4, **options: int) -> tuple[int, ...]:
    session = NgramDrafter(**options).open(1, 100)
    (block,) = session.draft([sequence(token_ids)], [length])
    assert block.fault is None
    return block.token_ids


def test_what_followed_the_same_tokens_is_proposed() -> None:
    assert proposed([1, 2, 3, 4, 5, 6, 9, 1, 2, 3]) == (4, 5, 6, 9)
    assert proposed([1, 2, 3, 4, 5, 6, 9, 1, 2, 3], length=2) == (4, 5)
    assert proposed([1, 2, 3, 4, 5, 6, 9, 1, 2, 3], block_size=3) == (4, 5, 6)


def test_a_long_match_is_better_than_a_recent_one_and_a_recent_one_than_an_old_one() -> None:
    assert proposed([7, 8, 1, 50, 9, 1, 60, 7, 8, 1], length=1) == (50,)
    assert proposed([1, 50, 2, 1, 60, 3, 1], length=1) == (60,)
    assert proposed([7, 8, 1, 50, 9, 1, 60, 7, 8, 1], length=1, longest=1) == (60,)


def test_nothing_is_proposed_where_nothing_matches() -> None:
    assert proposed([1, 2, 3, 4]) == ()
    assert proposed([5]) == ()
    assert proposed([1, 2, 3, 9, 3], longest=3, shortest=2) == ()


def test_a_repeating_end_may_be_proposed_up_to_the_end_of_the_text() -> None:
    assert proposed([4, 4, 4]) == (4,)


def test_sessions_follow_a_growing_text_and_rows_that_leave() -> None:
    session = NgramDrafter().open(2, 100)
    one, two = sequence([1, 2, 3]), sequence([5, 6, 5])
    assert [block.token_ids for block in session.draft([one, two], [3, 3])] == [(), (6, 5)]
    two.commit([6, 7])
    session.keep([1])
    (block,) = session.draft([two], [3])
    assert block.token_ids == ()
    two.commit([5])
    (block,) = session.draft([two], [3])
    assert block.token_ids == (6, 7, 5)


def test_answers_are_the_plain_ones_and_some_drafts_are_kept() -> None:
    engine = NativeTarget(tiny_transformer(scale=0.3))
    prompt = PROMPT * 4
    plain = run(engine, prompt=prompt, max_tokens=40)
    looked_up = run(engine, NgramDrafter(), prompt, draft_length=6, max_tokens=40)
    assert looked_up.ids == plain.ids
    assert sum(stats.num_accepted for stats in looked_up.rounds) > 0
    batch = run_all(
        engine, NgramDrafter(), [make(engine, prompt, max_tokens=n) for n in (5, 30)], 6
    )
    assert [one.ids for one in batch] == [plain.ids[:5], plain.ids[:30]]


@pytest.mark.parametrize(("shortest", "longest"), [(0, 3), (4, 3)])
def test_impossible_lengths_are_refused(shortest: int, longest: int) -> None:
    with pytest.raises(ValueError, match="shortest"):
        NgramDrafter(shortest=shortest, longest=longest)
