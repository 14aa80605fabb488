"""`d3d timeline`: figures and picture of a trace, and what it says of files that are none."""

from __future__ import annotations

import json
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

from d3d.engine.metrics import overlap
from d3d.engine.round import Preparation, Round
from d3d.engine.trace import chrome_trace, read_trace
from d3d.errors import InvalidRequest
from support.command import d3d

ROUNDS = [
    Round(0, 0, 1, 0.50, 1.0, 10.0, Preparation("unprepared", "unprepared")),
    Round(4, 4, 5, 0.01, 1.0, 11.6, Preparation("hit", None, ((9.0, 10.4), (10.5, 11.2)))),
    Round(4, 2, 3, 0.20, 1.0, 13.8, Preparation("late", None, ((11.7, 12.5),))),
    Round(4, 1, 2, 0.30, 1.2, 15.1, Preparation("miss")),
    Round(0, 0, 1, 0.0, 0.9, 16.7),
]


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return write(tmp_path, chrome_trace(ROUNDS))


def write(directory: Path, content: Any) -> Path:
    path = directory / "trace.json"
    path.write_text(json.dumps(content))
    return path


def test_a_trace_read_back_is_what_was_written(trace: Path) -> None:
    read = read_trace(trace)
    assert [stats[:3] for stats in read] == [stats[:3] for stats in ROUNDS]
    assert [stats.started for stats in read] == pytest.approx(
        [stats.started - 9.0 for stats in ROUNDS]
    )
    assert [stats.preparation and stats.preparation[:2] for stats in read] == [
        stats.preparation and stats.preparation[:2] for stats in ROUNDS
    ]
    told, expected = overlap(read, 4).to_dict(), overlap(ROUNDS, 4).to_dict()
    assert told.pop("hit_rate_at") == expected.pop("hit_rate_at")
    assert told.pop("fallbacks") == expected.pop("fallbacks")
    assert told == pytest.approx(expected)


def test_the_figures_as_json_and_as_a_table(trace: Path) -> None:
    record = d3d("timeline", trace, "--json").record
    assert record["rounds"] == 5
    assert record["acceptance_length"] == pytest.approx(12 / 5)
    assert record["total_s"] == pytest.approx(17.6 - 10.0)
    assert record["hit_rate"] == pytest.approx(1 / 3)
    assert record["late"] == 1
    assert record["t_switch_s"] == pytest.approx(0.01)
    printed = d3d("timeline", trace)
    assert printed.code == 0
    for words in (
        "t_verify, ms",
        "1000.0",
        "t_switch, ms",
        "10.00",
        "overlap_ratio",
        "unprepared 1",
        "hit rate",
    ):
        assert words in printed.out


def test_the_picture_has_both_lanes_and_every_mark(trace: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    out = tmp_path / "picture.svg"
    assert d3d("timeline", trace, "--out", out).code == 0
    texts = {
        element.text for element in ElementTree.parse(out).iter("{http://www.w3.org/2000/svg}text")
    }
    assert {
        "target",
        "drafter",
        "hit",
        "miss",
        "late",
        "verify",
        "switch",
        "waits for a draft",
        "draft worker's pass",
    } <= texts
    assert {"4/4", "2/4", "1/4", "0/0"} <= texts
    assert any(
        str(text).startswith("5 rounds: t_draft 800.0 ms, t_verify 1000.0 ms, t_switch 10.00 ms")
        for text in texts
    )
    again = tmp_path / "again.svg"
    d3d("timeline", trace, "--out", again)
    assert again.read_bytes() == out.read_bytes()


def test_some_rounds_only_and_png(trace: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    out = tmp_path / "some.SVG"
    assert d3d("timeline", trace, "--out", out, "--start", 1, "--rounds", 2).code == 0
    texts = {
        element.text for element in ElementTree.parse(out).iter("{http://www.w3.org/2000/svg}text")
    }
    assert {"4/4", "2/4", "hit", "late"} <= texts
    assert not {"1/4", "0/0", "miss"} & texts
    assert d3d("timeline", trace, "--out", tmp_path / "some.png").code == 0
    assert (tmp_path / "some.png").read_bytes().startswith(b"\x89PNG")


def test_rounds_of_serial_mode_are_drawn_without_a_drafters_pass(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = write(tmp_path, chrome_trace([stats._replace(preparation=None) for stats in ROUNDS]))
    assert d3d("timeline", path, "--out", tmp_path / "serial.svg").code == 0
    record = d3d("timeline", path, "--json").record
    assert record["hit_rate"] is record["overlap_ratio"] is None


def test_where_nothing_can_be_drawn(
    trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert d3d("timeline", trace, "--out", tmp_path / "x.pdf").is_refusal("x.pdf", ".svg or .png")
    assert d3d("timeline", tmp_path / "nothing.json").is_refusal("nothing.json", "can't be read")
    assert d3d("timeline", tmp_path).is_refusal("can't be read")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert d3d("timeline", trace, "--out", tmp_path / "x.svg").is_refusal(
        "pip install 'd3d-decoding[bench]'"
    )
    assert d3d("timeline", trace).code == 0, "the table needs no matplotlib"


def test_a_picture_that_starts_behind_the_trace_or_can_not_be_written_is_refused(
    trace: Path, tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    assert d3d("timeline", trace, "--out", tmp_path / "x.svg", "--start", 5).is_refusal(
        "--start 5", "4"
    )
    assert d3d("timeline", trace, "--out", tmp_path / "nowhere" / "x.svg").is_refusal(
        "can't be written"
    )


def event(**changes: Any) -> dict[str, Any]:
    args = {"round": 0, "draft_length": 1, "num_accepted": 1, "num_committed": 2}
    return {"name": "verify", "ph": "X", "ts": 0.0, "dur": 1.0, "args": args, **changes}


WAIT = event(name="draft")


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ([], "traceEvents"),
        ({"traceEvents": {}}, "traceEvents"),
        ({"traceEvents": [1]}, "`ph`"),
        ({"traceEvents": [event(name="aten::mm")]}, "aten::mm"),
        ({"traceEvents": [event(args=None)]}, "verify"),
        ({"traceEvents": [event(), WAIT | {"dur": -1}]}, "`dur`"),
        ({"traceEvents": [event(), WAIT | {"ts": "soon"}]}, "`ts`"),
        ({"traceEvents": [event(ts=float("nan")), WAIT]}, "`ts`"),
        ({"traceEvents": [event()]}, "complete"),
        ({"traceEvents": [event(), event(), WAIT]}, "twice"),
        ({"traceEvents": [event(args=event()["args"] | {"round": 1}), WAIT]}, "complete"),
        (
            {"traceEvents": [event(args=event()["args"] | {"num_accepted": 2}), WAIT]},
            "more than was drafted",
        ),
        (
            {"traceEvents": [event(args=event()["args"] | {"num_committed": None}), WAIT]},
            "`num_committed`",
        ),
        ({"traceEvents": [event(args=event()["args"] | {"readiness": "maybe"}), WAIT]}, "maybe"),
        ({"traceEvents": [event(), WAIT, event(name="prepare", args={})]}, "passes of a drafter"),
    ],
    ids=str,
)
def test_a_foreign_or_damaged_trace_is_refused(content: Any, why: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="no trace that d3d wrote") as refused:
        read_trace(write(tmp_path, content))
    assert why in str(refused.value)


def test_a_trace_without_a_round_says_so(tmp_path: Path) -> None:
    assert d3d("timeline", write(tmp_path, chrome_trace([]))).is_refusal("holds no round")


@pytest.mark.parametrize(
    "content", [b"", b"{", b"\xff\xfe", b"[" * 100_000], ids=["empty", "cut", "binary", "deep"]
)
def test_a_file_that_is_no_json_is_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_bytes(content)
    assert d3d("timeline", path).is_refusal("trace.json", "d3d generate --trace")
