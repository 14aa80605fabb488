"""The documented training configuration is the configuration, and the five-minute chain of the
training guide runs, on a tiny model."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from pydantic import BaseModel

from d3d.cli.app import app
from d3d.train.config import DrafterSpec, RunConfig, TrainConfig
from support.command import d3d

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
REFERENCE = (DOCS / "reference" / "training.md").read_text(encoding="utf-8")
GUIDE = (DOCS / "guide" / "training.md").read_text(encoding="utf-8")
TRAIN = GUIDE[GUIDE.index("\n## Train\n") : GUIDE.index("\n## Evaluate\n")]
ROWS = dict(re.findall(r"^\| `([a-z_.]+)` \| (.+?) \|", REFERENCE, re.MULTILINE))
COMMANDS = re.findall(r"^ {4}d3d (.+)$", TRAIN, re.MULTILINE)


def fields(model: type[BaseModel], prefix: str = "") -> dict[str, Any]:
    return {
        prefix + name: field.get_default(call_default_factory=True)
        for name, field in model.model_fields.items()
    }


def test_the_table_has_every_key_with_its_default() -> None:
    wanted = fields(RunConfig) | fields(DrafterSpec, "drafter.") | fields(TrainConfig, "train.")
    del wanted["drafter"], wanted["train"]
    assert ROWS.keys() == wanted.keys()
    del wanted["train.stages"]  # in words
    for name, default in wanted.items():
        shown = yaml.safe_load(ROWS[name].strip("`"))
        assert shown == (
            default.model_dump(mode="json") if isinstance(default, BaseModel) else default
        ), name


@pytest.mark.parametrize("line", COMMANDS)
def test_each_command_parses(line: str) -> None:
    name, *arguments = shlex.split(line)
    command = typer.main.get_command(app).commands[name]  # type: ignore[attr-defined]
    assert command.make_context(name, arguments).params


def test_the_five_minute_chain_on_a_tiny_model(tiny_target: Path, tmp_path: Path) -> None:
    recipe = ROOT / "recipes" / "five_minutes"
    subprocess.run([sys.executable, recipe / "prompts.py", tmp_path / "five"], check=True)
    model = ("--target", tiny_target, "--dtype", "float32", "--device", "cpu")
    for corpus, prompts in (("corpus", "train"), ("heldout_answers", "heldout")):
        given = (
            "--prompts",
            tmp_path / "five" / f"{prompts}.jsonl",
            "--max-tokens",
            24,
            "--limit",
            12,
        )
        assert d3d("data", tmp_path / "five" / f"{corpus}.jsonl", *given, *model).code == 0
    settings = yaml.safe_load((recipe / "train.yaml").read_text())
    settings["train"] |= {"steps": 60, "max_length": 250}
    (tmp_path / "train.yaml").write_text(yaml.safe_dump(settings | {"evaluate_every": 20}))
    run = tmp_path / "five" / "run"
    held_out = tmp_path / "five" / "heldout_answers.jsonl"
    # a random model's answers have nothing in common, so it is measured on what it has learnt
    outcome = d3d(
        "train",
        tmp_path / "five" / "corpus.jsonl",
        run,
        "--held-out",
        held_out,
        "--config",
        tmp_path / "train.yaml",
        *model,
    )
    assert outcome.code == 0, outcome.err
    rows = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 20, 40, 60]
    assert rows[-1]["acceptance_length"] > rows[0]["acceptance_length"], rows
    drafted = d3d(
        "generate",
        *model,
        "--drafter",
        run / "best",
        "--prompt",
        "hello",
        "--mode",
        "serial",
        "--max-tokens",
        16,
        "--json",
    )
    assert drafted.record["speculation"]["acceptance_length"] >= 1
