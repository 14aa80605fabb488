"""Drafts that the text itself holds spare the drafter, and change no answer."""

from __future__ import annotations

from typing import Any

import pytest

from d3d.engine.drafter import Draft, Target
from d3d.methods.serial.drafter import BlockDrafter
from d3d.target.native import NativeTarget
from support.drafters import text, tiny_drafter
from support.runs import PROMPT, SAMPLING, make, run_all
from support.tiny import tiny_transformer


class Nines:
    """A drafter that proposes nines, and notes what it is asked for."""

    block_size = 8

    def __init__(self) -> None:
        self.asked: list[list[int]] = []
        self.kept: list[list[int]] = []
        self.joined: list[int] = []

    def open(self, num_sequences: int, capacity: int) -> Nines:
        return self

    def open_beside(self, target: Target) -> Nines | None:
        return None

    def draft(self, sequences: list[Sequence], lengths: list[int]) -> list[Draft]:
        self.asked.append(list(lengths))
        return [Draft((9,) * length) for length in lengths]

    def keep(self, rows: list[int]) -> None:
        self.kept.append(rows)

    def join(self, count: int) -> None:
        self.joined.append(count)


def test_a_text_goes_on_as_it_did_and_the_drafter_is_not_asked() -> None:
    nines = Nines()
    session = LookupFirst(nines, 2).open(1, 100)
    (block,) = session.draft([sequence([1, 2, 3, 4, 5, 1, 2])], [3])
    assert block == Draft((3, 4, 5), looked_up=True)
    assert nines.asked == []


def test_a_shorter_run_than_wanted_is_left_to_the_drafter() -> None:
    nines = Nines()
    for shortest, expected in ((2, (3, 4)), (3, (9, 9))):
        (block,) = (
            LookupFirst(nines, shortest).open(1, 100).draft([sequence([1, 2, 3, 4, 5, 1, 2])], [2])
        )
        assert block.token_ids == expected
        assert block.looked_up == (shortest == 2)


def test_in_a_batch_the_drafter_is_asked_for_the_others_alone_and_rows_move_together() -> None:
    nines = Nines()
    session = LookupFirst(nines, 2).open(2, 100)
    repeats, new = sequence([1, 2, 3, 1, 2]), sequence([5, 6, 7])
    assert [block.token_ids for block in session.draft([repeats, new], [2, 3])] == [
        (3, 1),
        (9, 9, 9),
    ]
    assert nines.asked == [[0, 3]]
    session.keep([1])
    session.join(1)
    assert (nines.kept, nines.joined) == ([[1]], [1])
    new.commit([5, 6])
    assert [block.token_ids for block in session.draft([new, repeats], [1, 1])] == [(7,), (3,)]


def test_what_repeats_is_taken_to_go_on_repeating() -> None:
    assert continuation([4, 4, 4], 2, 5) == (4, 4, 4, 4, 4)
    assert continuation([1, 2, 3, 1, 2], 2, 7) == (3, 1, 2, 3, 1, 2, 3)
    assert continuation([1, 2, 3], 1, 0) == ()


@pytest.mark.parametrize("beside", [True, False], ids=["beside the target", "alone"])
@pytest.mark.parametrize("params", SAMPLING.values(), ids=SAMPLING.keys())
def test_the_answer_stays_the_targets_own(params: dict[str, Any], beside: bool) -> None:
    base = tiny_transformer(seed=1, scale=0.3)
    engine = NativeTarget(base)
    drafter = BlockDrafter(tiny_drafter(base, scope="slots" if beside else None), 97)
    prompts = [PROMPT * 4, text(8, 1), PROMPT * 2]
    plain = run_all(
        engine, None, [make(engine, prompt, max_tokens=40, **params) for prompt in prompts]
    )
    found = run_all(
        engine,
        LookupFirst(drafter, 3),
        [make(engine, prompt, max_tokens=40, **params) for prompt in prompts],
        draft_length=5,
        max_batch=2,
    )
    assert [one.ids for one in found] == [one.ids for one in plain]
    assert not any(one.faults for one in found)
    rounds = [stats for one in found for stats in one.rounds]
    assert any(stats.looked_up and stats.num_accepted for stats in rounds)
    assert any(not stats.looked_up and stats.draft_length for stats in rounds)
