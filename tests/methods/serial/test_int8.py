"""A target with rounded weights works like any other: all modes give its own ids."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import d3d
from d3d.model.int8 import quantizations
from support.command import d3d as command
from support.tiny_model import write_tiny_drafter

pytestmark = pytest.mark.skipif(
    not quantizations(torch.device("cpu")), reason="this processor does not multiply bytes"
)
SAMPLING: list[dict[str, Any]] = [{}, {"temperature": 0.9, "seed": 5}]


@pytest.fixture(scope="module")
def model(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> d3d.Model:
    drafter = write_tiny_drafter(tmp_path_factory.mktemp("int8") / "drafter", tiny_target)
    return d3d.load(str(tiny_target), drafter, dtype="float32", quantize="int8")


@pytest.mark.parametrize("sampling", SAMPLING, ids=["greedy", "sampled"])
@pytest.mark.parametrize(
    "options",
    [
        {"mode": "serial"},
        {"mode": "serial", "draft_length": 3},
        {"mode": "fused", "rows": 9},
        {"mode": "async"},
    ],
    ids=str,
)
def test_every_mode_gives_the_rounded_targets_own_ids(
    model: d3d.Model, options: dict[str, Any], sampling: dict[str, Any]
) -> None:
    for prompt in ("hello", "the cat sat"):
        plain = model.generate(prompt, mode="plain", max_tokens=40, ignore_eos=True, **sampling)
        drafted = model.generate(prompt, max_tokens=40, ignore_eos=True, **options, **sampling)
        assert drafted.token_ids == plain.token_ids
        assert drafted.to_dict()["quantize"] == "int8"
    model.close()


def test_the_rounded_target_is_near_the_unrounded_one(model: d3d.Model, tiny_target: Path) -> None:
    other = d3d.load(str(tiny_target), dtype="float32", plain=True)
    ids = model.encode("hello")
    engines = [loaded.parts.target for loaded in (model, other)]
    rounded, exact = (engine.forward([0], [ids])[0].logits() for engine in engines)
    for engine in engines:
        engine.cache.end(0)
    difference = (rounded - exact).abs().max()
    assert 0 < difference < 0.05 * exact.abs().max()


def test_the_command_says_what_the_weights_are(tiny_target: Path) -> None:
    arguments = (
        "generate",
        "--prompt",
        "hello",
        "--target",
        str(tiny_target),
        "--mode",
        "plain",
        "--dtype",
        "float32",
        "--max-tokens",
        "4",
    )
    outcome = command(*arguments, "--quantize", "int8", "--json")
    assert outcome.record["quantize"] == "int8"
    assert "float32 with int8 weights" in outcome.err
    assert "quantize" not in command(*arguments, "--json").record
    refused = command(*arguments, "--quantize", "int3")
    assert refused.code == 2
    assert "quantize: 'int3' is not supported; use int8" in refused.err
