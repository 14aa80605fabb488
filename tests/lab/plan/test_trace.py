"""Rounds are read from what other commands write, and what is no trace is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from d3d.engine.round import Preparation, Round
from d3d.engine.trace import chrome_trace
from d3d.errors import InvalidRequest
from d3d.lab.plan.estimates import fused_rounds, hit_rates, recall_of, split_budget
from d3d.lab.plan.simulate import serial
from d3d.lab.plan.trace import MODELLED_ROUNDS, Trace, of_histogram, of_mean, read_trace
from lab.plan.test_simulate import FixedCosts


def written(directory: Path, record: Any) -> Path:
    file = directory / "trace.json"
    file.write_text(record if isinstance(record, str) else json.dumps(record))
    return file


def test_a_mean_gives_the_rounds_that_have_it() -> None:
    for mean in (1.0, 2.5, 7.88, 17.0):
        assert of_mean(mean, 16, rounds=5000).acceptance_length == pytest.approx(mean, abs=0.02)


@pytest.mark.parametrize(("mean", "width"), [(0.9, 4), (5.1, 4), (1.5, 0), (float("nan"), 4)])
def test_a_mean_that_can_not_be_is_refused(mean: float, width: int) -> None:
    with pytest.raises(InvalidRequest, match="acceptance length"):
        of_mean(mean, width)


@pytest.mark.parametrize("histogram", [[], [3], [0, 0], [1, -1]])
def test_a_histogram_that_can_not_be_is_refused(histogram: list[int]) -> None:
    with pytest.raises(InvalidRequest, match="histogram"):
        of_histogram(histogram, source="x")


def test_counts_of_a_histogram_are_weights() -> None:
    """The rounds that are modelled stay few, in the given proportions."""
    for histogram in ([1_000_000, 500_000], [10**12, 0, 10**12], [7, 900_000, 10, 300_000]):
        trace = of_histogram(histogram, source="x")
        assert len(trace.rounds) == MODELLED_ROUNDS
        exact = 1 + sum(k * count for k, count in enumerate(histogram)) / sum(histogram)
        assert trace.acceptance_length == pytest.approx(exact, abs=len(histogram) / MODELLED_ROUNDS)
    assert of_histogram([3, 2], source="x").histogram == (3, 2)


@pytest.mark.parametrize(
    "make",
    [lambda: of_mean(2.0, 10**9), lambda: of_histogram([1] * 2000, source="x")],
)
def test_drafts_beyond_any_block_are_refused(make: Callable[[], Trace]) -> None:
    with pytest.raises(InvalidRequest, match=r"draft length: .* is not within 1 and"):
        make()


def test_shorter_drafts_keep_their_own_tokens_at_most() -> None:
    trace = of_histogram([4, 3, 2, 1], source="x")
    short = trace.shortened(1)
    assert short.histogram == (4, 6)
    assert short.acceptance_length == pytest.approx(1.6)
    assert trace.shortened(3) is trace
    with pytest.raises(InvalidRequest, match="draft_length"):
        trace.shortened(4)


def test_an_answer_is_read(tmp_path: Path) -> None:
    speculation = {"mode": "serial", "num_accepted_histogram": [1, 0, 2], "undrafted_rounds": 0}
    record = {
        "usage": {"prompt_tokens": 10, "completion_tokens": 7},
        "timing": {"tpot_s": 0.5},
        "speculation": speculation,
    }
    trace = read_trace(written(tmp_path, "some text\n" + json.dumps(record)))
    assert (trace.mode, trace.draft_length, trace.histogram) == ("serial", 2, (1, 0, 2))
    assert sum(one.num_committed for one in trace.records) == 6  # the last round was cut
    assert trace.rounds[0].context == 11
    assert trace.measured is not None
    assert (trace.measured.tpot_s, trace.measured.tokens) == (0.5, 6)
    plain = read_trace(written(tmp_path, record | {"speculation": None}))
    assert (plain.mode, len(plain.rounds), plain.rounds[-1].context) == ("plain", 6, 16)


def test_rounds_of_several_modes_are_refused(tmp_path: Path) -> None:
    speculation = {"mode": "auto", "num_accepted_histogram": [1, 0, 2], "undrafted_rounds": 1}
    record = {
        "usage": {"prompt_tokens": 10, "completion_tokens": 7},
        "timing": {"tpot_s": 0.5},
        "speculation": speculation,
    }
    with pytest.raises(InvalidRequest, match="auto mode"):
        read_trace(written(tmp_path, record))


def test_a_timeline_is_read(tmp_path: Path) -> None:
    rounds = [
        Round(3, 2, 3, 0.1, 0.2, 5.0, Preparation("unprepared")),
        Round(3, 0, 1, 0.1, 0.2, 5.3, Preparation("hit", None, ((5.1, 5.2),))),
        Round(3, 3, 4, 0.2, 0.2, 5.6, Preparation("miss")),
    ]
    rounds.append(Round(0, 0, 1, 1.0, 0.2, 6.0, Preparation("late", "late")))
    trace = read_trace(written(tmp_path, chrome_trace(rounds)))
    assert trace.fallbacks == 1
    assert [one.hit for one in trace.rounds] == [False, True, False, None]
    told = [
        one._replace(preparation=one.preparation._replace(fitted=number == 3))
        for number, one in enumerate(rounds)
        if one.preparation
    ]
    assert [one.hit for one in read_trace(written(tmp_path, chrome_trace(told))).rounds] == [
        False,
        False,
        False,
        True,
    ]
    assert [one.num_committed for one in trace.records] == [3, 1, 4, 1]
    assert trace.mode == "async"
    assert trace.measured is not None
    about = {"mode": "serial", "dtype": "float32", "threads": 2, "prompt_tokens": 9, "tpot_s": 0.25}
    trace = read_trace(written(tmp_path, chrome_trace(rounds, about)))
    assert trace.mode == "serial"
    assert trace.rounds[1].context == 13
    assert trace.measured == ("serial", 0.25, 9, "float32", 2)


def test_slots_of_fused_rounds_are_told(tmp_path: Path) -> None:
    rounds = [Round(3, 2, 3, 0.1, 0.2, 5.0, num_slots=5), Round(0, 0, 1, 0.0, 0.2, 5.3)]
    trace = read_trace(written(tmp_path, chrome_trace(rounds, {"mode": "fused"})))
    assert [one.num_slots for one in trace.records] == [5, 0]


def test_copies_cost_no_draft(tmp_path: Path) -> None:
    rounds = [
        Round(3, 2, 3, 0.1, 0.2, 5.0),
        Round(3, 3, 4, 0.0, 0.2, 5.3, looked_up=True),
    ]
    trace = read_trace(written(tmp_path, chrome_trace(rounds)))
    assert [one.looked_up for one in trace.records] == [False, True]
    assert [one.num_slots for one in trace.records] == [None, None], "no round of fused mode"
    record = {
        "usage": {"completion_tokens": 8, "prompt_tokens": 9},
        "timing": {"tpot_s": 0.1},
        "speculation": {
            "mode": "serial",
            "num_accepted_histogram": [0, 0, 1, 1],
            "lookup_rounds": 1,
        },
    }
    assert sum(one.looked_up for one in read_trace(written(tmp_path, record)).records) == 1
    free = serial(trace.rounds, FixedCosts())
    paid = serial(
        [one._replace(record=one.record._replace(looked_up=False)) for one in trace.rounds],
        FixedCosts(),
    )
    assert free.draft_s == pytest.approx(paid.draft_s / 2)
    assert free.verify_s == paid.verify_s


def test_an_evaluation_is_read_with_its_recall(tmp_path: Path) -> None:
    record = {
        "mode": "serial",
        "num_accepted_histogram": [6, 5],
        "bonus_recall": {"1": [0.2, 0.4], "4": [0.6, 0.8], "16": [1.0, None]},
    }
    trace = read_trace(written(tmp_path, record))
    assert trace.recall == {1: (0.2, 0.4), 4: (0.6, 0.8), 16: (1.0, None)}
    assert recall_of(trace.recall, 0, 1) == 0.2
    assert recall_of(trace.recall, 0, 2) == pytest.approx(0.4)
    assert recall_of(trace.recall, 1, 16) == 0.8
    assert recall_of(trace.recall, 0, 0) == 0
    assert split_budget([6, 5], trace.recall, 2) == [1, 1]
    assert split_budget([100, 1], trace.recall, 2) == [2, 0]
    rates = hit_rates(trace, 2)
    assert rates is not None
    assert rates[0] == pytest.approx((0.2, 0.4))
    assert hit_rates(of_histogram([1, 1], source="x"), 8) is None
    replayed = read_trace(
        written(
            tmp_path,
            {"num_accepted_histogram": [5, 5], "hit_rate_at": {"4": [0.5, 0.3], "16": [0.7, None]}},
        )
    )
    assert hit_rates(replayed, 8) == ((pytest.approx(0.6), 0.3), "replayed")


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "{}",
        "not json",
        '{"traceEvents": []}',
        '{"traceEvents": [{"name": "verify"}]}',
        '{"usage": {}, "timing": 1}',
    ],
)
def test_what_is_no_trace_is_refused(tmp_path: Path, content: str) -> None:
    with pytest.raises(InvalidRequest, match=r"trace\.json"):
        read_trace(written(tmp_path, content))
    with pytest.raises(InvalidRequest, match="can't be read"):
        read_trace(tmp_path / "nothing")


def test_fused_rounds_keep_no_more_than_serial_ones() -> None:
    trace = of_histogram([10, 30, 20, 15, 10, 10, 5], source="x")
    few, many = (_mean(fused_rounds(trace, rows)) for rows in (4, 24))
    assert 1 <= few <= many <= trace.acceptance_length
    nothing = Trace(
        "x",
        "serial",
        2,
        tuple(
            one._replace(record=one.record._replace(num_accepted=0, num_committed=1))
            for one in trace.rounds
        ),
    )
    assert _mean(fused_rounds(nothing, 8)) == 1


def _mean(rounds: list[Any]) -> float:
    return float(sum(one.record.num_committed for one in rounds) / len(rounds))
