"""The script for a GPU machine, on tiny shapes and a CPU: that it runs, and that it says what it
can't do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import gpu_overlap as script


@pytest.mark.slow
def test_tiny_shapes_on_a_cpu_give_a_whole_report(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    assert (
        script.main(
            [
                "--tiny",
                "--device",
                "cpu",
                "--outcomes",
                "2",
                "--tokens",
                "40",
                "--hit-rate",
                "1.0",
                "--json",
                str(path),
            ]
        )
        == 0
    )
    report = json.loads(path.read_text())
    assert report["identity"]["different"] == 0
    assert report["identity"]["identical"] == 48
    figures = report["overlap"]["outcomes 2"]
    assert figures.keys() >= {
        "t_draft_s",
        "t_verify_s",
        "overlap_ratio",
        "acceptance_length",
        "ms_per_token",
    }
    assert figures["acceptance_length"] > 2, "drafts come, in time or late"
    assert figures["t_draft_s"] > 0
    assert figures["t_verify_s"] > 0
    assert report["overlap"]["drafted_alone_s"].keys() == {"one block", "outcomes 2"}


def test_the_scripted_acceptance_length_is_what_was_asked_for() -> None:
    kept = script._keep_probability(7.9)
    assert 1 + sum(kept**place for place in range(1, 17)) == pytest.approx(7.9)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "no CUDA device is available"),
        (["--device", "cpu"], "add --tiny"),
        (["--device", "cpu", "--tiny", "--placement", "streams"], "streams is for CUDA"),
    ],
    ids=str,
)
def test_without_a_gpu_it_says_so(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert script.main(arguments) == 2
    assert words in capsys.readouterr().err
