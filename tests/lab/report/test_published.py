"""The README's figures come out of files: ours beside the published ones, with the command that
made them."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

from d3d.errors import InvalidRequest
from d3d.lab.bench.answers import Setting
from d3d.lab.bench.results import load_run
from d3d.lab.report.published import (
    BEGIN,
    END,
    PUBLISHED,
    beside_published,
    identity_line,
    replaced,
    summary,
)
from support.bench_rows import example_rows, row, write_run

SCRIPT = Path(__file__).parents[3] / "studies" / "readme_results.py"


@pytest.fixture
def results(tmp_path: Path) -> Path:
    rows = [one.model_copy(update={"set_name": "gsm8k"}) for one in example_rows()]
    rows += [one.model_copy(update={"set_name": "mbpp"}) for one in rows]
    rows += [
        row("llama_cpp", one.prompt_id, [(0.1, 1), (0.15, 4)], set_name="gsm8k")
        for one in rows[:3:2]
    ]
    longer = Setting(max_tokens=99)
    rows += [row("plain", "a", [(0.1, 1), (9.0, 5)], set_name="gsm8k", setting=longer)]
    write_run(tmp_path / "bench", rows, device="cpu")
    return tmp_path


def test_ours_stand_beside_the_published(results: Path) -> None:
    text = beside_published(load_run(results / "bench"))
    assert "| GSM8K | 4.88 | 658 | 10.0 | 1.50 [1.00, 2.00] | 2.00 | llama_cpp | 0.19 |" in text
    assert "| MBPP | 3.17 | 428 | 10.0 | 1.50 [1.00, 2.00] | 2.00 | - | - |" in text
    assert "| all | 3.72 |" in text
    assert "MT-Bench" not in text  # not in this run
    assert "`d3d bench run 'x|y'`" in text
    assert "2 cores of abacus, 2 threads, torch 2; 2026-01-01" in text


def test_modelled_times_are_labelled_and_win_no_comparison(results: Path) -> None:
    rows = [one.model_copy(update={"set_name": "gsm8k"}) for one in example_rows()]
    rows += [
        row("llama_cpp", one.prompt_id, [(0.1, 1), (0.15, 4)], set_name="gsm8k")
        for one in rows[::2]
    ]
    rows += [
        row("async_modelled", one.prompt_id, [(0.1, 1), (0.101, 4)], [], set_name="gsm8k")
        for one in rows[:3:2]
    ]
    text = beside_published(load_run(write_run(results / "modelled", rows, device="cpu")))
    assert "| GSM8K | 4.88 | 658 | 10.0 | 1.50 [1.00, 2.00] | 400.00 [" in text
    assert "| llama_cpp | 0.19 |" in text
    assert "modelled, not measured" in text


def test_the_published_mean_is_not_ours_to_change() -> None:
    seven = [one.speed_up for name, one in PUBLISHED.items() if name != "all"]
    assert len(seven) == 7
    # the published speed-ups share one baseline: tokens/s over speed-up is the same for all sets
    baselines = [one.tokens_per_s / one.speed_up for one in PUBLISHED.values()]
    assert max(baselines) - min(baselines) < 0.1


def test_identity_in_one_sentence() -> None:
    one = {"set": "gsm8k", "method": "serial", "compared": 20, "identical": 20, "rounding": 0}
    record = {
        "settings": {"dtype": "float32"},
        "methods": [one, one | {"method": "fused", "identical": 19, "rounding": 1}],
        "mistakes": 0,
        "commands": [["d3d", "bench", "identity"]],
    }
    text = identity_line(record)
    assert "39 of 40 answers of serial, fused over 1 sets have plain decoding's ids, 1 " in text
    assert "ids, 1 part at a near-tie, 0 elsewhere" in text
    assert "`d3d bench identity`" in text
    rounded = identity_line(record | {"settings": {"dtype": "float32", "quantize": "int8"}})
    assert "float32 with int8 weights: 39 of 40" in rounded


def test_the_block_between_the_marks_is_replaced_and_nothing_else(
    results: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    readme = results / "README.md"
    readme.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    monkeypatch.setattr(
        sys, "argv", ["readme_results.py", "--results", str(results), "--readme", str(readme)]
    )
    for _ in range(2):
        runpy.run_path(str(SCRIPT), run_name="__main__")
        text = readme.read_text()
        assert text.startswith(f"before\n{BEGIN}\n")
        assert text.endswith(f"{END}\nafter\n")
        assert "old" not in text
        assert "| GSM8K |" in text
    with pytest.raises(InvalidRequest, match="marks"):
        replaced("nothing here", "x")


def test_figures_of_a_busy_machine_are_called_provisional(results: Path) -> None:
    run = load_run(results / "bench")
    assert "Provisional" not in beside_published(run)
    run.provenance["sessions"][0]["machine"]["load_at_start"] = 1.5
    assert "Provisional" in beside_published(run)
    assert "Provisional" in summary(run)
    assert "| gsm8k | serial 2 | 2 | - | - | 2.00 | 2/2 |" in summary(run)


def test_any_run_in_short(results: Path) -> None:
    text = summary(load_run(results / "bench"))
    assert "| gsm8k | serial 2 | 2 | 13.3 | 1.50 [1.00, 2.00] | 2.00 | 2/2 |" in text
    assert "| gsm8k | plain | 2 | 10.0 | - | - | - |" in text
