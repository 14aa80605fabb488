"""The default draft length is that of least time per token, by measured passes and evaluated
acceptance."""

from __future__ import annotations

import json
from itertools import accumulate
from pathlib import Path

import pytest

import d3d
from d3d.hub.checkpoint import read_provenance
from d3d.methods.async_.config import AsyncConfig
from d3d.methods.costs import costs_journal, read_costs
from d3d.methods.draft_length import PRIOR_KEPT, best_length, paying_length, prices, survival
from d3d.methods.serial.config import SerialConfig
from d3d.target.native import NativeTarget
from support.command import d3d as command

KEPT = list(accumulate([0.7] * 16, lambda a, b: a * b))


@pytest.mark.parametrize(
    ("row", "draft", "overlapped", "length"),
    [
        (0.0, 0.5, False, 16),
        (0.0, 0.5, True, 16),
        (0.06, 0.5, False, 6),
        (0.06, 0.5, True, 5),
        (1.0, 0.1, False, 1),
        (0.06, 3.0, False, 8),
    ],
)
def test_dear_rows_make_drafts_short_and_dear_drafts_make_them_long(
    row: float, draft: float, overlapped: bool, length: int
) -> None:
    best = best_length(KEPT, row, draft, overlapped=overlapped)
    assert best == length

    def seconds_a_token(size: int) -> float:
        verify = 1 + row * size
        total = max(verify, draft) if overlapped else verify + draft
        return total / (1 + sum(KEPT[:size]))

    assert seconds_a_token(best) == min(seconds_a_token(size) for size in range(1, 17))


@pytest.fixture
def drafter(tiny_target: Path, tmp_path: Path) -> Path:
    """One that was evaluated at three positions."""
    from support.tiny_model import write_tiny_drafter

    path = write_tiny_drafter(tmp_path / "drafter", tiny_target)
    known = read_provenance(path) | {"measured": {"acceptance_at": [0.9, 0.8, 0.5]}}
    (path / "provenance.json").write_text(json.dumps(known))
    return path


def test_acceptance_is_that_of_the_evaluation_and_beyond_it_the_prior(
    tiny_target: Path, tiny_drafter: Path, drafter: Path
) -> None:
    parts = d3d.load(str(tiny_target), drafter, device="cpu", dtype="float32").parts
    further = [0.5 * PRIOR_KEPT**depth for depth in (1, 2, 3)]
    assert survival(parts) == pytest.approx([0.9, 0.8, 0.5, *further])
    parts.drafter_path = tiny_drafter  # not evaluated by position
    assert survival(parts) == pytest.approx([PRIOR_KEPT**depth for depth in range(1, 7)])


def test_it_is_measured_once_for_each_machine_and_the_doctor_tells(
    tiny_target: Path, drafter: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("d3d.methods.draft_length.paying_length", paying_length)
    monkeypatch.setattr("d3d.methods.draft_length.prices", lambda *_: (0.6, 0.5))
    first = d3d.load(str(tiny_target), drafter, device="cpu", dtype="float32")
    built = SerialConfig().build(first.parts)
    assert built.drafter is not None
    assert built.drafter.max_draft_length == 2
    monkeypatch.setattr("d3d.methods.draft_length.prices", lambda *_: pytest.fail("again"))
    again = d3d.load(str(tiny_target), drafter, device="cpu", dtype="float32")
    result = again.generate("hello", method="serial", max_tokens=6)
    assert result.speculation is not None
    assert result.speculation.draft_length == 2
    named = SerialConfig(draft_length=4).build(again.parts).drafter
    steps = SerialConfig(num_denoise_steps=3).build(again.parts).drafter
    assert named is not None
    assert steps is not None
    assert (named.max_draft_length, steps.max_draft_length) == (4, 3)
    costs = {name for entry in read_costs(costs_journal()) for name in entry}
    names = {"verified_row_price", "draft_price", "serial_draft_length"}
    assert names <= costs
    told = command("doctor").out
    assert all(name in told for name in names)


def test_prices_are_those_of_real_passes(tiny_target: Path, drafter: Path) -> None:
    parts = d3d.load(str(tiny_target), drafter, device="cpu", dtype="float32").parts
    assert isinstance(parts.target, NativeTarget)
    assert parts.drafter is not None
    row, draft = prices(parts.target, parts.drafter)
    assert 0 <= row < 1
    assert draft > 0
    assert parts.target.num_held == 0


def test_another_engine_has_a_fixed_default(tiny_target: Path, drafter: Path, cache: Path) -> None:
    model = d3d.load(
        str(tiny_target), drafter, device="cpu", dtype="float32", backend="transformers"
    )
    assert paying_length(model.parts) == 5
    assert not costs_journal().path.exists()


def test_a_dry_run_says_that_it_will_be_measured(tiny_target: Path, drafter: Path) -> None:
    facts = d3d.load(str(tiny_target), drafter, device="cpu", dtype="float32").parts.facts
    for config in (SerialConfig(), AsyncConfig(placement="thread")):
        assert config.describe(facts)["draft_length"] == "measured at the start"
        elsewhere = facts._replace(is_native=False)
        if isinstance(config, SerialConfig):
            assert config.describe(elsewhere)["draft_length"] == 5
    assert SerialConfig(draft_length=3).describe(facts)["draft_length"] == 3
