"""`async_modelled`: real tokens and real passes, and times that are modelled and say so."""

from __future__ import annotations

from pathlib import Path

import pytest

from d3d import load
from d3d.engine.round import Preparation, Round
from d3d.errors import InvalidRequest
from d3d.lab.bench.answers import Delivery, MethodOptions, Sampling, TimedAnswer
from d3d.lab.bench.methods import make_methods
from d3d.lab.bench.metrics import RowGroup
from d3d.lab.bench.own import LABEL, on_two_devices
from d3d.lab.bench.results import traces_of
from d3d.lab.bench.rows import read_rows
from d3d.lab.plan.rehearsal import overlapped
from support.command import d3d

ROUNDS = [
    Round(
        5, 2, 3, 7.0, 4.0, 100.0, Preparation("unprepared", None, ((0.0, 3.0), (3.0, 7.0)))
    ),  # draft 3, preparation 4
    Round(5, 1, 2, 6.0, 4.0, 111.0, Preparation("hit", None, ((0.0, 6.0),))),  # preparation 6
    Round(
        5, 0, 1, 5.0, 4.0, 121.0, Preparation("miss", None, ((0.0, 2.0), (2.0, 5.0)))
    ),  # draft 2, preparation 3
    Round(0, 0, 1, 0.0, 1.0, 130.0, None),
]


def test_rehearsed_rounds_overlap_as_on_paper() -> None:
    rounds, ends = overlapped(ROUNDS, 0.5, 0.25)
    # 3.5 until the first draft, verified to 7.5, as is the preparation; the round begins at 7.75:
    # hit, switch 0.5, verified to 12.25;
    # prepared until 14.25, the miss drafts 2 more, switch 0.5 (16.75), verified to 20.75; nothing
    # to wait for, verified 21 to 22
    assert ends == pytest.approx([7.75, 12.5, 21.0, 22.25])
    assert [one.t_draft for one in rounds] == pytest.approx([3.5, 0.5, 4.25, 0.0])
    assert [one.t_verify for one in rounds] == [4.0, 4.0, 4.0, 1.0]
    assert [one.preparation and one.preparation.readiness for one in rounds] == [
        "unprepared",
        "hit",
        "miss",
        None,
    ]


def test_an_answer_keeps_its_tokens_and_first_token_and_gets_the_models_times() -> None:
    deliveries = (
        Delivery(1.0, 1),
        Delivery(13.0, 3),
        Delivery(24.0, 2),
        Delivery(34.0, 1),
        Delivery(36.0, 1),
    )
    rounds = tuple(Round(*stats) for stats in ROUNDS)
    answer = TimedAnswer("x", tuple(range(8)), 8, "length", deliveries, rounds, wall_s=37.0)
    told = on_two_devices(answer, 0.5)
    rest = (35.0 - 31.0) / 4
    assert [one.num_tokens for one in told.deliveries] == [1, 3, 2, 1, 1]
    assert told.deliveries[0].at_s == 1.0
    assert told.deliveries[1].at_s == pytest.approx(1.0 + 7.5 + rest)
    assert told.deliveries[-1].at_s < 36.0
    assert told.wall_s == pytest.approx(told.deliveries[-1].at_s + 1.0)
    assert (told.modelled, told.text, told.token_ids) == (True, answer.text, answer.token_ids)
    assert on_two_devices(TimedAnswer("x", (1,), 1, "length", deliveries[:1], ()), 0.5).modelled


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, tiny_target: Path, tiny_drafter: Path) -> Path:
    """The directory of a small run of the method."""
    directory = tmp_path_factory.mktemp("modelled")
    (directory / "mine.jsonl").write_text('{"prompt": "the cat"}\n{"prompt": "hello"}\n')
    model = (
        "--target",
        tiny_target,
        "--drafter",
        tiny_drafter,
        "--dtype",
        "float32",
        "--device",
        "cpu",
    )
    where = (
        "--set",
        directory / "mine.jsonl",
        "--max-tokens",
        12,
        "--results",
        directory,
        "--draft-length",
        3,
    )
    outcome = d3d(
        "bench", "run", "one", *model, *where, "--method", "async_modelled", "--method", "serial"
    )
    assert outcome.code == 0, outcome.err
    return directory / "one"


def test_async_methods_may_draft_a_whole_block(tiny_target: Path, tiny_drafter: Path) -> None:
    model = load(str(tiny_target), tiny_drafter, device="cpu", dtype="float32")
    methods = make_methods(["async", "async_modelled"], model, MethodOptions(), Sampling())
    model.close()
    for method in methods[1:]:
        method.check(6)
        with pytest.raises(InvalidRequest, match="7 is not within 1 and the most"):
            method.check(7)


def test_its_ids_are_plains_and_its_rows_say_that_they_are_modelled(run: Path) -> None:
    rows = read_rows(run / "results.jsonl")
    modelled = [row for row in rows if row.method == "async_modelled"]
    assert {row.modelled for row in modelled} == {True}
    assert not any(row.modelled for row in rows if row.method != "async_modelled")
    for row in modelled:
        assert row.identity is not None
        assert row.identity.identical
        assert row.acceptance is not None
        first, *rest = row.acceptance.each_round
        assert first.readiness == "unprepared"
        assert {one.readiness for one in rest if one.draft_length > 1} <= {"hit", "late", "miss"}
        assert (
            sum(one.num_committed for one in row.acceptance.each_round) == row.completion_tokens - 1
        )


def test_tables_and_pictures_say_so_too(run: Path) -> None:
    outcome = d3d("bench", "report", run)
    assert outcome.code == 0, outcome.err
    assert LABEL in outcome.out
    report = (run / "report.md").read_text()
    headings = (
        "**In short**",
        "**Speed**",
        "**Speed-up**",
        "**Acceptance**",
        "**Where the time of a round goes**",
    )
    for heading in headings:
        assert LABEL in report.split(heading)[1].split("\n\n")[1]
    assert report.count(LABEL) >= len(headings) + 1


def test_a_run_can_be_planned_with_and_checked_against(run: Path) -> None:
    traces = {trace.mode: trace for trace in traces_of(run)}
    assert set(traces) == {"plain", "serial"}
    rows = [row for row in read_rows(run / "results.jsonl") if row.method == "serial"]
    assert sum(one.num_committed for one in traces["serial"].records) == sum(
        row.completion_tokens - 1 for row in rows
    )
    assert traces["serial"].rounds[0].context == rows[0].prompt_tokens + 1
    assert traces["serial"].measured is not None
    assert traces["serial"].measured.dtype == "float32"
    assert RowGroup("serial", "all", rows[0].setting).label in traces["serial"].source
