"""A drafter whose drafts are not kept is asked seldom, and again as soon as they are."""

from __future__ import annotations

from typing import Any

import pytest
from drafting.test_lookup_first import Nines

from d3d.methods.serial.drafter import BlockDrafter
from d3d.target.native import NativeTarget
from support.drafters import text, tiny_drafter
from support.runs import SAMPLING, make, run_all
from support.tiny import tiny_transformer


def rounds_of(
    session: PausingSession, sequence: Sequence, committed: list[int], count: int
) -> list[int]:
    """Lengths of so many drafts, behind each of which the text grows by `committed`."""
    lengths = []
    for _ in range(count):
        (block,) = session.draft([sequence], [4])
        lengths.append(len(block.token_ids))
        sequence.commit(committed)
    return lengths


def test_drafts_that_are_never_kept_are_made_in_every_eighth_round() -> None:
    nines, one = Nines(), sequence([1, 2, 3])
    session = Pausing(nines, 0.8).open(1, 1000)
    lengths = rounds_of(session, one, [1], 60)
    first = lengths.index(0)
    assert 1 < first < 10, "a few failures are no reason yet"
    assert lengths[first:] == ([0] * (RETRY - 1) + [4]) * ((60 - first) // RETRY) + [0] * (
        (60 - first) % RETRY
    )
    assert len(nines.asked) == sum(length > 0 for length in lengths), "a pause spares the drafter"


def test_drafts_that_are_kept_come_back() -> None:
    one = sequence([1, 2, 3])
    session = Pausing(Nines(), 0.8).open(1, 1000)
    rounds_of(session, one, [1], 40)
    lengths = rounds_of(session, one, [9, 9, 9, 9, 1], 40)
    back = lengths.index(4)
    assert back < RETRY
    assert lengths[-20:] == [4] * 20


def test_whether_one_kept_token_is_enough_hangs_on_the_threshold() -> None:
    assert rounds_of(Pausing(Nines(), 0.8).open(1, 1000), sequence([1]), [9, 1], 30) == [4] * 30
    assert 0 in rounds_of(Pausing(Nines(), 1.5).open(1, 1000), sequence([1]), [9, 1], 30)


def test_nothing_pauses_before_there_was_a_draft() -> None:
    assert rounds_of(Pausing(Nines(), 7.0).open(1, 1000), sequence([1]), [1], 10) == [4] + [0] * (
        RETRY - 1
    ) + [4, 0]


@pytest.mark.parametrize(
    ("draft", "later", "kept"),
    [
        ((5, 6, 7), [5, 6, 8], 2),
        ((5, 6), [5, 6, 7], 2),
        ((5, 6), [7], 0),
        ((), [7], 0),
        ((5, 6), [5, 6, 7, 8, 9, 9], 2),
        ((5, 6), [5], 1),
    ],
)
def test_what_a_draft_came_to_is_read_off_the_text(
    draft: tuple[int, ...], later: list[int], kept: int
) -> None:
    history = History(0.0, draft=draft, place=3)
    history.mean = 0.0
    history.look([1, 2, 3, *later])
    assert history.mean == pytest.approx(0.2 * kept)
    history.look([1, 2, 3, *later, 4])
    assert history.mean == pytest.approx(0.2 * kept), "once"


def test_each_sequence_has_pauses_of_its_own_and_rows_move_together() -> None:
    nines = Nines()
    good, bad = sequence([1]), sequence([2])
    session = Pausing(nines, 0.8).open(2, 1000)
    for _ in range(20):
        session.draft([bad, good], [4, 4])
        bad.commit([1])
        good.commit([9, 9, 9, 9, 1])
    assert [0, 4] in nines.asked
    assert [4, 0] not in nines.asked
    session.keep([1])
    session.join(1)
    assert (nines.kept, nines.joined) == ([[1]], [1])
    assert [len(block.token_ids) for block in session.draft([good, sequence([3])], [4, 4])] == [
        4,
        4,
    ]


@pytest.mark.parametrize("beside", [True, False], ids=["beside the target", "alone"])
@pytest.mark.parametrize("params", SAMPLING.values(), ids=SAMPLING.keys())
def test_the_answer_stays_the_targets_own(params: dict[str, Any], beside: bool) -> None:
    base = tiny_transformer(seed=1)
    engine = NativeTarget(base)
    drafter = BlockDrafter(tiny_drafter(base, scope="slots" if beside else None), 97)
    plain = run_all(
        engine, None, [make(engine, text(8, seed), max_tokens=40, **params) for seed in range(3)]
    )
    paused = run_all(
        engine,
        Pausing(drafter, 2.5),
        [make(engine, text(8, seed), max_tokens=40, **params) for seed in range(3)],
        draft_length=5,
        max_batch=2,
    )
    assert [one.ids for one in paused] == [one.ids for one in plain]
    assert not any(one.faults for one in paused)
    assert any(stats.draft_length == 0 for one in paused for stats in one.rounds[:-6])
    assert any(stats.draft_length for one in paused for stats in one.rounds)
