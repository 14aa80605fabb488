"""`d3d prune` as it is typed, on a tiny target."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from d3d.hub.checkpoint import read_config
from support.command import Outcome, d3d
from support.tiny_model import write_tiny_drafter, write_tiny_target

PROMPTS = [f"say {word}" for word in ("cat", "mat", "two", "hello", "world", "much")]


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target of four layers, a drafter, and answers."""
    root = tmp_path_factory.mktemp("prune")
    target = write_tiny_target(root / "target", num_hidden_layers=4)
    write_tiny_drafter(root / "drafter", target, anchor_slot=True)
    (root / "prompts.jsonl").write_text(
        "".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS)
    )
    made = d3d(
        "data",
        root / "answers.jsonl",
        "--prompts",
        root / "prompts.jsonl",
        "--target",
        target,
        "--max-tokens",
        16,
    )
    assert made.code == 0, made.err
    return root


def prune(parts: Path, *options: object, out: str = "run") -> Outcome:
    common = (
        parts / "drafter",
        parts / "answers.jsonl",
        parts / out,
        "--target",
        parts / "target",
        "--draft-length",
        4,
    )
    return d3d("prune", *common, *options)


def test_a_curve_a_picture_and_a_checkpoint_that_generates(parts: Path) -> None:
    pytest.importorskip("matplotlib")
    done = prune(parts, "--fewest-layers", 2, "--objective", "serial", "--measure", 1)
    assert done.code == 0, done.err
    chosen = Path(done.out.strip())
    record = json.loads((parts / "run" / "curve.json").read_text())
    assert [depth["layers"] for depth in record["curve"]] == [4, 3, 2]
    assert record["timings"]["2"]["measured_serial_ms"] > 0
    assert chosen.name == f"{record['chosen']['layers']:02d}-layers"
    table = (parts / "run" / "curve.md").read_text()
    assert table.count("\n| ") == 3
    assert record["chosen"]["reason"] in table
    assert (parts / "run" / "curve.svg").read_text().lstrip().startswith("<?xml")
    layers = read_config(chosen).drafter.slot_layers
    assert layers is None or len(layers) == record["chosen"]["layers"]
    common = (
        "--target",
        parts / "target",
        "--prompt",
        "hello",
        "--max-tokens",
        12,
        "--dtype",
        "float32",
        "--json",
    )
    plain = d3d("generate", *common, "--mode", "plain")
    drafted = d3d("generate", *common, "--drafter", chosen)
    assert drafted.record["token_ids"] == plain.record["token_ids"]


def test_healing_is_told_in_the_curve(parts: Path) -> None:
    options = ("--fewest-layers", 3, "--judge", parts / "answers.jsonl")
    assert prune(parts, *options, out="both").is_refusal("would choose layers and judge")
    common = (
        "--prompts",
        parts / "prompts.jsonl",
        "--target",
        parts / "target",
        "--max-tokens",
        16,
    )
    d3d("data", parts / "corpus.jsonl", *common, "--temperature", 1)
    assert prune(parts, "--heal", parts / "corpus.jsonl", out="healed").is_refusal(
        "there is no corpus to train on"
    )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--objective", "speed"), ("objective", "share, serial, async")),
        (("--config", "train.yaml"), ("--heal",)),
        (("--fewest-layers", 9), ("fewest layers: 9",)),
        (("--draft-length", 9), ("draft_length: 9",)),
    ],
)
def test_what_can_not_be_is_refused_in_one_line(
    options: tuple[object, ...], words: tuple[str, ...], parts: Path
) -> None:
    assert prune(parts, *options, out="refused").is_refusal(*words)
