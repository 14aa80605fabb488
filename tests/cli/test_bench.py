"""`d3d bench` as a shell sees it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from support.bench_rows import example_rows, write_run
from support.command import Outcome, d3d


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "mine.jsonl"
    file.write_text('{"prompt": "the cat"}\n{"prompt": "hello"}\n{"prompt": "how much"}\n')
    return file


@pytest.fixture
def bench(tmp_path: Path, prompts: Path, tiny_target: Path, tiny_drafter: Path) -> Any:
    def run(*arguments: object, name: str = "first") -> Outcome:
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
        return d3d(
            "bench",
            "run",
            name,
            "--set",
            prompts,
            "--max-tokens",
            6,
            "--results",
            tmp_path / "results",
            *model,
            *arguments,
        )

    return run


def rows(tmp_path: Path, name: str = "first") -> list[dict[str, Any]]:
    return [
        json.loads(line)
        for line in (tmp_path / "results" / name / "results.jsonl").read_text().splitlines()
    ]


def test_run_report_and_compare(bench: Any, tmp_path: Path) -> None:
    outcome = bench("--method", "serial", "--method", "ngram", "--prompts", 2, "--draft-length", 2)
    assert outcome.code == 0, outcome.err
    assert outcome.out.startswith(f"{tmp_path / 'results' / 'first'}: 6 answers")
    assert "6/6" in outcome.err
    found = rows(tmp_path)
    assert {row["method"] for row in found} == {"plain", "serial", "ngram"}
    assert all(row["completion_tokens"] <= 6 for row in found)
    directory = tmp_path / "results" / "first"
    outcome = d3d("bench", "report", directory, "--no-pictures")
    assert outcome.code == 0, outcome.err
    assert "over plain" in outcome.out
    assert (directory / "report.md").read_text().startswith("# Benchmark first")
    assert "<h1>Benchmark first</h1>" in (directory / "report.html").read_text()
    assert bench("--method", "serial", "--draft-length", 2, name="second").code == 0
    outcome = d3d(
        "bench",
        "compare",
        directory,
        tmp_path / "results" / "second",
        "--output",
        tmp_path / "both",
    )
    assert outcome.code == 0, outcome.err
    assert "A and B" in outcome.out
    assert "A is first, B is second." in (tmp_path / "both" / "report.md").read_text()


def test_a_run_is_extended_by_the_same_command_with_more(bench: Any, tmp_path: Path) -> None:
    assert bench("--method", "ngram", "--prompts", 1).code == 0
    before = rows(tmp_path)
    assert bench("--method", "ngram", "--prompts", 3).code == 0
    after = rows(tmp_path)
    assert after[: len(before)] == before
    assert len(after) == 6


def test_the_report_goes_where_it_is_told(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", example_rows())
    outcome = d3d("bench", "report", run, "--output", tmp_path / "elsewhere" / "deep")
    assert outcome.code == 0, outcome.err
    assert sorted(path.name for path in (tmp_path / "elsewhere" / "deep").iterdir()) == [
        "pictures",
        "report.html",
        "report.md",
    ]
    assert sorted(path.name for path in run.iterdir()) == ["provenance.json", "results.jsonl"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--method", "nope"), "there are plain, serial"),
        (("--method", "transformers", "--temperature", 1), "compared greedily"),
        (("--set", "nope"), "there is no set of this name"),
        (("--set", "gsm8k"), "--data"),
        (("--draft-length", 99), "draft_length: 99"),
        (("--temperature", "nan"), "temperature"),
        (("--prompts", -1), "prompts"),
    ],
    ids=str,
)
def test_bad_input_gets_one_clear_line_before_anything_is_written(
    bench: Any, tmp_path: Path, arguments: tuple[object, ...], words: str
) -> None:
    assert bench(*arguments).is_refusal(words)
    assert not (tmp_path / "results" / "first" / "results.jsonl").exists()


@pytest.mark.parametrize("name", ["../x", "a/b", "", "."])
def test_a_name_is_a_plain_word(bench: Any, name: str) -> None:
    assert bench(name=name).is_refusal("name")


def test_another_setting_under_the_same_name_is_refused(bench: Any) -> None:
    assert bench("--method", "ngram", "--prompts", 1).code == 0
    assert bench("--method", "ngram", "--prompts", 1, "--seed", 4).is_refusal("another seed")


@pytest.mark.parametrize("command", ["report", "compare"])
def test_a_directory_without_a_run_is_refused(tmp_path: Path, command: str) -> None:
    assert d3d("bench", command, *[tmp_path] * (2 if command == "compare" else 1)).is_refusal(
        "provenance.json"
    )
