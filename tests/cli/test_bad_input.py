"""Silly values of options and arguments, in every command: one clear line and exit code 2, before
anything is loaded or written."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from d3d.cli.requests import read_prompt
from d3d.errors import InvalidRequest
from d3d.lab.bench.harness import Benchmark
from d3d.train.answers import CorpusRun
from support.bench_rows import example_rows, write_run
from support.command import d3d

NAME = "x" * 300
PLAN = ("plan", "--datasheet", "h100")
MEAN = ("--acceptance-length", 2, "--draft-length", 4)


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "the cat"}\n{"prompt": "hello"}\n')
    return file


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
@pytest.mark.parametrize(
    ("arguments", "option"),
    [
        (("generate", "x"), "--temperature"),
        (("generate", "x"), "--presence-penalty"),
        (("generate", "x"), "--draft-confidence"),
        (("chat",), "--top-p"),
        (PLAN, "--acceptance-length"),
        ((*PLAN, *MEAN), "--overhead-ms"),
        (("data", "c.jsonl", "--prompts", "p"), "--suffix-share"),
        (("train", "c", "o"), "--minutes"),
    ],
)
def test_numbers_that_are_not_finite(arguments: Any, option: str, value: str) -> None:
    assert d3d(*arguments, option, value).is_refusal(option)


@pytest.mark.parametrize(
    "arguments",
    [
        ("generate", "x", "--trace", NAME),
        ("generate", "x", "--model", NAME),
        ("generate", "x", "--drafter", NAME),
        ("data", NAME, "--prompts", "p"),
        ("data", "c.jsonl", "--prompts", NAME),
        ("train", "c", NAME, "--held-out", "h"),
        ("plan", "--profile", NAME, *MEAN),
        ("timeline", NAME),
        ("show", f"{NAME}.yaml"),
        ("calibrate", NAME, "--model", "x.yaml"),
        ("bench", "report", NAME),
        ("evaluate", "d", NAME),
        ("profile", NAME),
    ],
    ids=lambda arguments: " ".join(map(str, arguments))[:20],
)
def test_names_that_no_file_can_have(arguments: Any) -> None:
    assert d3d(*arguments).is_refusal("xxx", "too long")


def test_a_loop_of_links(tmp_path: Path) -> None:
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    for arguments in (("bench", "report", loop), ("generate", "x", "--model", loop)):
        assert d3d(*arguments).is_refusal(str(loop), "symbolic links")


def test_bytes_that_are_not_utf8(tmp_path: Path, prompts: Path) -> None:
    for option, arguments in {
        "name": ("bench", "run", "\udce9", "--results", tmp_path),
        "--gguf": ("bench", "run", "x", "--gguf", "\udce9", "--results", tmp_path),
        "--stop": ("generate", "x", "--stop", "\udce9"),
    }.items():
        assert d3d(*arguments).is_refusal(f"{option}: it is not valid Unicode", "UTF-8")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--acceptance-length", 0, "--draft-length", 4), ["acceptance length: 0 is impossible"]),
        (("--histogram", ""), ["--histogram '' is not a list of counts"]),
        ((*MEAN, "--kept-layers", 0), ["layers"]),
        ((*MEAN, "--dtype", "float32"), ["--dtype", "--profile only"]),
        ((*MEAN, "--threads", 0), ["--threads", "--profile only"]),
        ((*MEAN, "--rows", 10**9), ["rows"]),
        (("--acceptance-length", 2, "--draft-length", 10**9), ["draft length"]),
    ],
)
def test_options_of_plan(arguments: Any, words: list[str]) -> None:
    assert d3d(*PLAN, *arguments).is_refusal(*words)


def test_a_million_rounds_are_planned_as_weights() -> None:
    few, many = (
        d3d(*PLAN, "--histogram", counts, "--json").record["tables"][0]["rows"]
        for counts in ("1000,500", "1000000,500000")
    )
    assert [row["mode"] for row in few] == [row["mode"] for row in many]
    for one, other in zip(few, many, strict=True):
        assert float(one["ms a token"]) == pytest.approx(float(other["ms a token"]), rel=0.01)


def test_options_without_effect(tmp_path: Path, prompts: Path) -> None:
    run = ("bench", "run", "x", "--results", tmp_path, "--set", prompts)
    for arguments, word in (
        ((*run, "--gguf", "x.gguf"), "llama_cpp"),
        ((*run, "--server-url", "http://x"), "server"),
        ((*run, "--assistant", "x"), "transformers_assistant"),
        ((*run, "--draft-model", "x"), "draft_model"),
        ((*run, "--method", "draft_model", "--draft-model", " "), "empty"),
        ((*run, "--data", prompts), "no such directory"),
        (("timeline", prompts, "--start", 3), "--out"),
        (("prune", "d", "h", "o", "--heal-steps", 3), "--heal "),
    ):
        assert d3d(*arguments).is_refusal(word), arguments


def test_one_run_is_not_compared_with_itself(tmp_path: Path) -> None:
    one = write_run(tmp_path / "one" / "run", example_rows())
    assert d3d("bench", "compare", one, one).is_refusal("one run")
    other = write_run(tmp_path / "other" / "run", example_rows())
    outcome = d3d("bench", "compare", one, other, "--output", tmp_path)
    assert outcome.code == 0
    assert f"A is {one}, B is {other}" in (tmp_path / "report.md").read_text()


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_packed_files_where_none_are_read(suffix: str, prompts: Path, tmp_path: Path) -> None:
    packed = tmp_path / f"x.jsonl{suffix}"
    for arguments in (
        ("data", packed, "--prompts", prompts),
        ("generate", "x", "--record", packed),
        ("generate", "x", "--trace", packed),
        (*PLAN, "--trace", packed),
        ("timeline", packed),
        ("calibrate", packed, "--model", "smollm2-135m-fast"),
    ):
        assert d3d(*arguments).is_refusal(str(packed), "packed")
    assert not packed.exists()


@pytest.mark.parametrize("content", ["", "\n \n", '{"answer": "x"}\n'])
def test_prompts_without_a_prompt(
    content: str, tiny_target: Path, tiny_drafter: Path, tmp_path: Path
) -> None:
    file = tmp_path / "empty.jsonl"
    file.write_text(content)
    model = ("--target", tiny_target, "--dtype", "float32")
    for arguments in (
        ("data", tmp_path / "c.jsonl", "--prompts", file, *model),
        ("bench", "run", "x", "--set", file, "--results", tmp_path, *model),
        ("tune", file, tmp_path / "out", *model, "--drafter", tiny_drafter),
    ):
        assert d3d(*arguments).is_refusal(str(file)), arguments
    assert not (tmp_path / "c.jsonl").exists()


def test_an_output_that_is_a_file(
    tiny_target: Path, tiny_drafter: Path, prompts: Path, tmp_path: Path
) -> None:
    corpus, held_out = tmp_path / "c.jsonl", tmp_path / "h.jsonl"
    model = ("--target", tiny_target, "--dtype", "float32")
    more = tmp_path / "more.jsonl"
    more.write_text('{"prompt": "two and two"}\n')
    for file, source in ((corpus, prompts), (held_out, more)):
        made = d3d(
            "data", file, "--prompts", source, "--max-tokens", 12, "--temperature", 1, *model
        )
        assert made.code == 0
    before = prompts.read_bytes()
    for arguments in (
        ("train", corpus, prompts, "--held-out", held_out, *model),
        ("prune", tiny_drafter, corpus, prompts, *model),
        ("tune", more, prompts, *model, "--drafter", tiny_drafter),
    ):
        assert d3d(*arguments).is_refusal(str(prompts)), arguments
    assert prompts.read_bytes() == before


class Directory(io.StringIO):
    """Standard input that is a directory."""

    def read(self, size: int | None = -1) -> str:
        raise IsADirectoryError(21, "Is a directory")


def test_a_standard_input_that_can_not_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = io.StringIO()
    closed.close()
    for stream, word in ((None, "closed"), (closed, "closed"), (Directory(), "Is a directory")):
        monkeypatch.setattr(sys, "stdin", stream)
        with pytest.raises(InvalidRequest, match=f"standard input .*{word}"):
            read_prompt("-", None, raw=False)


def test_a_preset_that_decodes_plainly_says_so(tiny_target: Path, tmp_path: Path) -> None:
    preset = tmp_path / "plain.yaml"
    preset.write_text(json.dumps({"target": str(tiny_target), "mode": "plain", "dtype": "float32"}))
    outcome = d3d("generate", "x", "--model", preset, "--max-tokens", 2)
    assert "speculation: off (the preset decodes plainly)" in outcome.err
    outcome = d3d("generate", "x", "--model", preset, "--max-tokens", 2, "--method", "plain")
    assert "speculation: off (plain mode)" in outcome.err


def test_ctrl_c_says_what_is_kept(
    tiny_target: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_arguments: object) -> None:
        raise KeyboardInterrupt

    model = ("--target", tiny_target, "--dtype", "float32")
    monkeypatch.setattr(CorpusRun, "write", interrupted)
    monkeypatch.setattr(Benchmark, "run", interrupted)
    for arguments, words in (
        (("data", tmp_path / "c.jsonl", "--prompts", prompts), "c.jsonl holds 0 answers"),
        (
            ("bench", "run", "x", "--set", prompts, "--results", tmp_path, "--method", "ngram"),
            "x holds 0 answers",
        ),
    ):
        outcome = d3d(*arguments, *model)
        assert outcome.code == 130
        assert words in outcome.err
        assert outcome.err.count("\n") == 1
