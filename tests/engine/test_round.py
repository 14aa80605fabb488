"""A round as files keep it: written, read back, and the arrays of older benchmark files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from d3d.engine.round import Preparation, Round, TokenLogprob

RESULTS = sorted((Path(__file__).parents[2] / "results").glob("*/results.jsonl"))

ROUNDS = [
    Round(5, 3, 4, 0.01, 0.02),
    Round(0, 0, 1, 0.0, 0.02, preparation=Preparation("unprepared")),
    Round(5, 5, 6, 0.01, 0.02, preparation=Preparation("hit", fitted=True)),
    Round(0, 0, 1, 0.25, 0.5, preparation=Preparation("late", "late", fitted=False)),
    Round(3, 2, 3, 0.01, 0.02, looked_up=True),
    Round(4, 1, 2, 0.01, 0.02, num_slots=9),
    Round(4, 1, 2, 0.01, 0.02, num_slots=None),
]


@pytest.mark.parametrize("round_", ROUNDS)
def test_what_was_written_is_read_back(round_: Round) -> None:
    stored = json.loads(json.dumps(round_.to_json(), allow_nan=False))
    assert Round.from_json(stored) == round_
    assert Round.from_json(stored).to_json() == stored
    assert Round.from_json(round_) is round_


def test_a_file_keeps_counts_and_times_and_what_is_not_its_default() -> None:
    fields = {
        "draft_length": 5,
        "num_accepted": 3,
        "num_committed": 4,
        "t_draft": 0.01,
        "t_verify": 0.02,
    }
    assert ROUNDS[0].to_json() == fields
    full = Round(
        *ROUNDS[0][:5],
        started=7.0,
        preparation=Preparation("miss", "dead", ((1.0, 2.0),), ("it sneezed",), fitted=False),
        device_span=(7.1, 7.2),
        looked_up=True,
        num_slots=2,
        request_id=4,
        number=9,
        token_ids=(1, 2, 3, 4),
        text="abc",
        finish_reason="stop",
        logprobs=(TokenLogprob(1, -0.5, ()),),
        fault="broken",
    )
    extra = {"readiness": "miss", "cause": "dead", "fitted": False}
    assert full.to_json() == fields | extra | {"looked_up": True, "num_slots": 2}
    read = Round.from_json(full.to_json())
    assert read[:5] == full[:5]
    assert read.preparation == Preparation("miss", "dead", fitted=False)
    assert (read.started, read.device_span, read.text, read.number) == (0.0, None, "", 1)


@pytest.mark.parametrize(
    ("array", "expected"),
    [
        ([5, 3, 4, 0.01, 0.02], Round(5, 3, 4, 0.01, 0.02, num_slots=None)),
        ([5, 3, 4, 0.01, 0.02, None], Round(5, 3, 4, 0.01, 0.02, num_slots=None)),
        (
            [5, 3, 4, 0.01, 0.02, "hit", True],
            Round(5, 3, 4, 0.01, 0.02, 0.0, Preparation("hit"), looked_up=True, num_slots=None),
        ),
        ([5, 3, 4, 0.01, 0.02, None, False, 7], Round(5, 3, 4, 0.01, 0.02, num_slots=7)),
        (
            [0, 0, 1, 0, 1, "late", False, 0, True],
            Round(0, 0, 1, 0.0, 1.0, 0.0, Preparation("late", fitted=True)),
        ),
    ],
)
def test_arrays_of_older_files_are_read(array: list[Any], expected: Round) -> None:
    assert Round.from_json(array) == Round.from_json(tuple(array)) == expected


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.parent.name)
def test_every_round_of_the_results_in_this_repository_is_read(path: Path) -> None:
    count = 0
    for line in path.read_text(encoding="utf-8").splitlines():
        each = (json.loads(line).get("acceptance") or {}).get("each_round") or []
        for stored in each:
            round_ = Round.from_json(stored)
            values = stored if isinstance(stored, list) else list(stored.values())
            assert list(round_[:5]) == values[:5]
            assert round_.readiness == (values[5] if len(values) > 5 else None)
            count += 1
    assert count > 400


def test_there_are_results_to_read() -> None:
    assert len(RESULTS) >= 5


@pytest.mark.parametrize(
    ("stored", "message"),
    [
        (7, "an object or an array, not int"),
        (None, "an object or an array, not NoneType"),
        ([], "draft_length is not a count: None"),
        ([5, 3], "num_committed is not a count: None"),
        ([5, -1, 4, 0.0, 0.0], "num_accepted is not a count: -1"),
        ([True, 0, 1, 0.0, 0.0], "draft_length is not a count: True"),
        ([5, 1.0, 4, 0.0, 0.0], "num_accepted is not a count: 1.0"),
        ([2, 3, 4, 0.0, 0.0], "accepted more than was drafted"),
        ([5, 3, 4, -0.1, 0.0], "t_draft is not a number of seconds: -0.1"),
        ([5, 3, 4, 0.0, "x"], "t_verify is not a number of seconds: 'x'"),
        ([5, 3, 4, 0.0, float("nan")], "t_verify is not a number of seconds"),
        ([5, 3, 4, 0.0, 0.0, "soon"], "readiness is none of hit, late, miss, unprepared: 'soon'"),
        ([5, 3, 4, 0.0, 0.0, None, False, -2], "num_slots is not a count: -2"),
        ({"draft_length": 5}, "num_accepted is not a count: None"),
    ],
)
def test_anything_else_is_refused(stored: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Round.from_json(stored)


def test_when_it_was_verified() -> None:
    assert Round(1, 1, 2, 0.5, 0.25, started=10.0).verification == (10.5, 10.75)
    assert Round(1, 1, 2, 0.5, 0.25, 10.0, device_span=(10.6, 10.7)).verification == (10.6, 10.7)


def test_what_it_says_of_its_preparation() -> None:
    assert (ROUNDS[0].readiness, ROUNDS[0].fitted) == (None, None)
    assert (ROUNDS[2].readiness, ROUNDS[2].fitted) == ("hit", True)
    assert ROUNDS[4].num_nodes == ROUNDS[4].draft_length == 3
