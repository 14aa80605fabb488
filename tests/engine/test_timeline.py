"""Metrics and traces of rounds with known times."""

from __future__ import annotations

import json

import pytest

from d3d.engine.metrics import common_time, overlap
from d3d.engine.round import Preparation, Round
from d3d.engine.trace import chrome_trace

ROUNDS = [
    Round(4, 2, 3, 0.50, 1.0, 10.0, Preparation("unprepared")),
    Round(4, 4, 5, 0.01, 1.0, 11.6, Preparation("hit", None, ((9.0, 10.4), (10.5, 11.2)))),
    Round(4, 4, 5, 0.03, 1.0, 12.7, Preparation("hit", None, ((11.7, 12.5),))),
    Round(0, 0, 1, 0.20, 1.0, 13.8, Preparation("late", "late")),
    Round(4, 1, 2, 0.30, 1.2, 15.1, Preparation("miss", None, ((13.0, 15.2),), ("it sneezed",))),
    Round(0, 0, 1, 0.0, 0.9, 16.7, Preparation("unprepared", "dead")),
    Round(0, 0, 1, 0.0, 0.9, 17.7),
]


def test_figures_by_hand() -> None:
    figures = overlap(ROUNDS, 4)
    assert figures.hit_rate == 2 / 5
    assert figures.hit_rate_at == (0.0, 0.0, 1.0, None, 0.5)
    assert figures.late == 1
    assert figures.fallbacks == {"dead": 1, "late": 1}
    assert figures.t_draft_s == pytest.approx((0.8 + 1.4) / 2)
    assert figures.t_verify_s == 1.0
    assert figures.t_switch_s == pytest.approx(0.02)
    assert figures.exposed_draft_s == pytest.approx(1.04 / 7)
    both = (11.2 - 10.5) + (12.5 - 11.7) + (13.73 - 13.0) + (15.0 - 14.0)
    assert figures.overlap_ratio == pytest.approx(both / (1.4 + 0.7 + 0.8 + 2.2))


def test_no_rounds_have_no_figures() -> None:
    figures = overlap([], 4)
    assert (
        figures.hit_rate is figures.t_draft_s is figures.t_switch_s is figures.overlap_ratio is None
    )
    assert (figures.late, figures.fallbacks) == (0, {})
    json.dumps(figures.to_dict(), allow_nan=False)


@pytest.mark.parametrize(
    ("first", "second", "common"),
    [
        ([(0.0, 2.0)], [(1.0, 3.0)], 1.0),
        ([(0.0, 1.0)], [(1.0, 2.0)], 0.0),
        ([(0.0, 9.0)], [(1.0, 2.0), (3.0, 5.0)], 3.0),
        ([], [(1.0, 2.0)], 0.0),
    ],
)
def test_common_time(
    first: list[tuple[float, float]], second: list[tuple[float, float]], common: float
) -> None:
    assert common_time(first, second) == common_time(second, first) == common


def test_the_trace_has_every_span_in_its_place() -> None:
    trace = json.loads(json.dumps(chrome_trace(ROUNDS), allow_nan=False))
    spans = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert all(event["ts"] >= 0 and event["dur"] >= 0 for event in spans)
    named = [(event["name"], event["tid"]) for event in spans]
    assert named.count(("verify", 1)) == 7
    assert named.count(("switch", 1)) == 2
    assert named.count(("draft", 1)) == 5
    assert named.count(("prepare", 2)) == 4
    second = next(
        event for event in spans if event["name"] == "verify" and event["args"]["round"] == 1
    )
    assert second["ts"] == pytest.approx(1e6 * (11.61 - 9.0))
    assert second["dur"] == pytest.approx(1e6)
    assert second["args"] == {
        "round": 1,
        "draft_length": 4,
        "num_accepted": 4,
        "num_committed": 5,
        "readiness": "hit",
        "cause": None,
    }
