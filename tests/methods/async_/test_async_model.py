"""`mode="async"` from Python and from the command line, with a tiny model and a drafter loaded from
files."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

import d3d
from d3d.api import Model
from d3d.errors import InvalidRequest
from d3d.hub.checkpoint import save_drafter
from d3d.methods.async_.opening import StoredDrafter
from d3d.methods.async_.packed_pass import PackedDrafter
from d3d.methods.async_.workers import ProcessWorker
from d3d.model.linear import Linear
from support.command import d3d as command
from support.drafters import text
from support.tiny_model import open_tiny, random_drafter, write_tiny_drafter, write_tiny_target

PROMPT = "how much is two and two?"
LONG = {"max_tokens": 60, "ignore_eos": True}
KEYS = {
    "hit_rate",
    "late",
    "fallbacks",
    "t_draft_s",
    "t_verify_s",
    "t_switch_s",
    "overlap_ratio",
    "exposed_draft_s",
    "hit_rate_at",
}


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    target = write_tiny_target(tmp_path_factory.mktemp("target"))
    return target, write_tiny_drafter(tmp_path_factory.mktemp("drafter"), target)


@pytest.fixture
def model(paths: tuple[Path, Path]) -> Iterator[Model]:
    target, drafter = paths
    loaded = d3d.load(str(target), drafter, device="cpu", dtype="float32")
    yield loaded
    loaded.close()


@pytest.mark.parametrize(
    "sampling", [{}, {"temperature": 1.0, "seed": 6}], ids=["greedy", "sampled"]
)
@pytest.mark.parametrize(
    "options",
    [{}, {"draft_length": 6, "outcomes": 32, "miss_policy": "bonus_only"}],
    ids=["defaults", "options"],
)
def test_the_answer_is_plain_decodings_and_the_record_says_how_it_was_made(
    options: dict[str, Any], sampling: dict[str, Any], model: Model
) -> None:
    plain = model.generate(PROMPT, mode="plain", **LONG, **sampling)
    result = model.generate(PROMPT, mode="async", **LONG, **sampling, **options)
    assert (result.token_ids, result.text) == (plain.token_ids, plain.text)
    record = json.loads(json.dumps(result.to_dict(), allow_nan=False))["speculation"]
    assert record["mode"] == "async"
    assert record.keys() >= KEYS
    assert record["t_draft_s"] > 0
    assert record["t_verify_s"] > 0
    assert record["acceptance_rate"] >= 0
    assert len(record["hit_rate_at"]) == options.get("draft_length", 5) + 1
    assert result.speculation is not None
    assert (
        result.speculation.warnings == ()
        or "not one drafted token" in result.speculation.warnings[0]
    )


@pytest.mark.slow
def test_a_process_answers_alike_and_survives_being_killed(model: Model) -> None:
    plain = model.generate(PROMPT, mode="plain", **LONG)
    whole = model.generate(PROMPT, mode="async", placement="processes", **LONG)
    assert whole.token_ids == plain.token_ids
    assert sum(round_.draft_length for round_ in whole.rounds) > 0
    worker = model.parts.workers["processes"].coordinator.link.worker
    assert isinstance(worker, ProcessWorker)
    pid = worker.process.pid
    last = None
    for number, chunk in enumerate(
        model.stream(PROMPT, mode="async", placement="processes", **LONG)
    ):
        if number == 2:
            os.kill(pid, signal.SIGKILL)
        last = chunk.result
    assert last is not None
    assert last.speculation is not None
    assert last.token_ids == plain.token_ids
    assert f"the draft process {pid} died" in last.speculation.warnings
    assert last.to_dict()["speculation"]["fallbacks"]["dead"] > 0
    again = model.generate(PROMPT, mode="async", placement="processes", **LONG)
    assert again.token_ids == plain.token_ids
    assert sum(round_.draft_length for round_ in again.rounds) > 0
    worker = model.parts.workers["processes"].coordinator.link.worker
    assert isinstance(worker, ProcessWorker)
    model.close()
    assert not psutil.pid_exists(worker.process.pid)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"mode": "async", "placement": "streams"}, "CUDA"),
        ({"mode": "async", "placement": "cellar"}, "placement: 'cellar' should be 'thread'"),
        ({"mode": "async", "miss_policy": "guess"}, "should be 'draft_now' or 'bonus_only'"),
        ({"mode": "async", "outcomes": 0}, "outcomes: 0"),
        ({"mode": "async", "outcomes": 257}, "outcomes: 257"),
        ({"mode": "async", "draft_length": 7}, "draft_length: 7"),
        ({"mode": "async", "num_denoise_steps": 1}, "num_denoise_steps: method async"),
        ({"mode": "async", "rows": 8}, "rows: method async"),
        ({"mode": "serial", "outcomes": 4}, "outcomes: method serial"),
        ({"mode": "fused", "miss_policy": "draft_now"}, "miss_policy: method fused"),
        ({"mode": "plain", "placement": "thread"}, "placement: method plain"),
    ],
    ids=str,
)
def test_what_means_nothing_is_refused(options: dict[str, Any], words: str, model: Model) -> None:
    with pytest.raises(InvalidRequest, match=words):
        model.stream(PROMPT, **options)


def test_a_drafter_that_is_loaded_again_is_as_quick_as_the_first(
    paths: tuple[Path, Path], tmp_path: Path
) -> None:
    target = open_tiny(paths[0])
    original = random_drafter(target, anchor_slot=True, draft_vocabulary=40)
    original.set_draft_ids(torch.arange(7, 247, 6))
    save_drafter(tmp_path / "drafter", original, target)
    again = StoredDrafter(paths[0], tmp_path / "drafter", "float32")()
    assert isinstance(again, PackedDrafter)
    assert any(isinstance(one, Linear) and one.merged is not None for one in again.model.modules())
    assert again.model._draft_head is not None
    here = PackedDrafter(original, target.vocab_size)
    assert again.open(4).draft(text(9), 5) == here.open(4).draft(text(9), 5)


def test_a_draft_process_finds_files_when_the_working_directory_has_changed(
    paths: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(paths[0])
    target, drafter = (os.path.relpath(path) for path in paths)
    with d3d.load(target, drafter, device="cpu", dtype="float32") as loaded:
        monkeypatch.chdir(tmp_path)
        assert loaded.parts.drafter_path is not None
        stored = StoredDrafter(loaded.target.path, loaded.parts.drafter_path, "float32")
        assert stored().most_together > 1


def test_a_drafter_without_files_can_not_go_to_a_process(model: Model) -> None:
    with pytest.raises(InvalidRequest, match="loaded from a checkpoint"):
        Model(replace(model.parts, drafter_path=None, workers={})).stream(
            PROMPT, mode="async", placement="processes"
        )


def test_the_command_prints_the_record_and_writes_the_trace(
    paths: tuple[Path, Path], tmp_path: Path
) -> None:
    target, drafter = paths
    common = (
        "generate",
        "--prompt",
        PROMPT,
        "--target",
        target,
        "--max-tokens",
        30,
        "--device",
        "cpu",
        "--dtype",
        "float32",
        "--json",
    )
    trace = tmp_path / "trace.json"
    outcome = command(
        *common,
        "--drafter",
        drafter,
        "--mode",
        "async",
        "--placement",
        "thread",
        "--outcomes",
        4,
        "--trace",
        trace,
    )
    assert outcome.code == 0, outcome.err
    assert outcome.record["token_ids"] == command(*common, "--mode", "plain").record["token_ids"]
    assert outcome.record["speculation"].keys() >= KEYS
    assert "speculation: async" in outcome.err
    names = {event["name"] for event in json.loads(trace.read_text())["traceEvents"]}
    assert names >= {"verify", "prepare", "thread_name"}


def test_the_command_refuses_before_it_loads_anything(
    paths: tuple[Path, Path], tmp_path: Path
) -> None:
    target, drafter = paths
    assert command(
        "generate", "--prompt", PROMPT, "--target", target, "--mode", "async"
    ).is_refusal("needs a drafter")
    nowhere = tmp_path / "nowhere" / "trace.json"
    assert command(
        "generate", "--prompt", PROMPT, "--target", target, "--drafter", drafter, "--trace", nowhere
    ).is_refusal("--trace")
