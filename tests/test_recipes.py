"""Every training configuration that is shipped loads, and is planned without its models."""

from __future__ import annotations

from pathlib import Path

import pytest

from d3d.train.config import read_run_config
from support.command import d3d

RECIPES = Path(__file__).parents[1] / "recipes"
CONFIGS = sorted(RECIPES.glob("*/*.yaml"))
PARAMETERS = {
    "8b-from-1.7b": (1.72e9, 0),
    "8b-from-8b": (0.301e9, 8.19e9),
    "32b-from-8b": (8.19e9, 0),
    "1.5b-from-0.5b": (0.494e9, 0),
}
"""Trainable and frozen, as the models' cards have them."""


@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: file.stem)
def test_it_loads(file: Path) -> None:
    config = read_run_config(file)
    assert max(stage.block_size for stage in config.train.stages) <= config.drafter.block_size


@pytest.mark.slow
@pytest.mark.parametrize("name", PARAMETERS)
def test_it_is_planned_from_the_models_configs_alone(name: str) -> None:
    (file,) = [file for file in CONFIGS if file.stem == name]
    outcome = d3d(
        "train", "--config", file, "--dry-run", "--processes", 8, "--tflops", 250, "--device", "cpu"
    )
    assert outcome.code == 0, outcome.err
    lines = dict(line.split("  ", 1) for line in outcome.out.splitlines())
    trainable, frozen = (
        float(part.split()[0].replace(",", "")) for part in lines["parameters"].rsplit(", ", 1)
    )
    assert trainable == pytest.approx(PARAMETERS[name][0], rel=0.01)
    assert frozen == pytest.approx(PARAMETERS[name][1], rel=0.01)
    assert "no corpus given" in lines["corpus"]
    assert "GB" in lines["peak memory"]
    assert "stated" in lines["rate"]


def test_the_target_of_32b_has_32_billion_parameters() -> None:
    import torch

    from d3d.hub.open_model import load_config
    from d3d.train.work import blank_transformer

    for name, count in (
        ("qwen3/models/qwen3-32b", 32.8e9),
        ("qwen2.5-coder/models/qwen2.5-coder-1.5b", 1.54e9),
    ):
        model = blank_transformer(load_config(RECIPES / name), torch.bfloat16)
        assert sum(parameter.numel() for parameter in model.parameters()) == pytest.approx(
            count, rel=0.01
        )
