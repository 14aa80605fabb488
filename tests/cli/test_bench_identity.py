"""`d3d bench identity` compares every mode with plain decoding, goes on where it was, and fails on
a mistake."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from d3d.lab.bench.results import load_run
from d3d.lab.report.benchmark import identity_record, identity_sections
from d3d.lab.report.tables import markdown_report
from support.bench_rows import example_rows, write_run
from support.command import Outcome, d3d


@pytest.fixture
def identity(tmp_path: Path, tiny_target: Path, tiny_drafter: Path) -> Any:
    file = tmp_path / "mine.jsonl"
    file.write_text('{"id": "a", "prompt": "the cat"}\n{"id": "b", "prompt": "hello"}\n')

    def run(*arguments: object) -> Outcome:
        model = (
            "--target",
            tiny_target,
            "--drafter",
            tiny_drafter,
            "--device",
            "cpu",
            "--max-tokens",
            8,
        )
        return d3d("bench", "identity", "--set", file, "--results", tmp_path, *model, *arguments)

    return run


def test_all_modes_are_compared_in_float32(identity: Any, tmp_path: Path) -> None:
    outcome = identity()
    assert outcome.code == 0, outcome.err
    record = json.loads((tmp_path / "identity" / "identity.json").read_text())
    assert record["settings"]["dtype"] == "float32"
    assert {one["method"] for one in record["methods"]} == {"serial", "fused", "async"}
    assert all(one["compared"] == one["identical"] == 2 for one in record["methods"])
    assert record["divergences"] == []
    assert record["mistakes"] == 0
    assert "| mine | fused" in (tmp_path / "identity" / "report.md").read_text()


def test_a_mistake_is_found_listed_and_told_by_the_exit_code(identity: Any, tmp_path: Path) -> None:
    assert identity("--method", "serial").code == 0
    file = tmp_path / "identity" / "results.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    row = next(row for row in rows if row["method"] == "serial" and row["prompt_id"] == "b")
    row["identity"] |= {"identical": False, "position": 3, "gap": 0.5}
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    outcome = identity("--method", "serial")
    assert outcome.code == 1, outcome.err
    record = json.loads((tmp_path / "identity" / "identity.json").read_text())
    assert record["mistakes"] == 1
    (found,) = record["divergences"]
    assert (found["prompt_id"], found["position"], found["gap"], found["is_rounding"]) == (
        "b",
        3,
        0.5,
        False,
    )
    assert len(file.read_text().splitlines()) == len(rows)  # nothing was answered twice


def test_rounding_is_listed_and_no_mistake(tmp_path: Path) -> None:
    rows = example_rows()
    assert rows[1].identity is not None
    parted = rows[1].identity.model_copy(
        update={"identical": False, "position": 2, "gap": 1e-6, "is_rounding": True}
    )
    run = load_run(
        write_run(
            tmp_path / "run",
            [rows[0], rows[1].model_copy(update={"identity": parted}), *rows[2:]],
            device="cpu",
            temperature=0.0,
        )
    )
    record = identity_record(run)
    assert record["mistakes"] == 0
    assert len(record["divergences"]) == 1
    assert [(one["identical"], one["rounding"], one["other"]) for one in record["methods"]] == [
        (1, 1, 0)
    ]
    assert "1.0e-06 | rounding" in markdown_report("Identity", identity_sections(run))


def test_other_programs_need_a_greedy_run(identity: Any) -> None:
    assert identity("--method", "transformers", "--temperature", 1).is_refusal("compared greedily")
