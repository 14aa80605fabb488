"""The real SmolLM2-135M with the drafter that is shipped for it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import d3d
from d3d.engine.drafter import Draft
from d3d.engine.request import Request
from d3d.hub.checkpoint import read_config
from d3d.hub.presets import read_preset
from d3d.methods.fused.engine import FusedTarget
from d3d.methods.fused.plan import RowPlan
from d3d.target.native import NativeTarget

pytestmark = pytest.mark.real_model

PROMPTS = (
    "Tom has 3 boxes with 8 pencils in each. He gives 5 pencils to a friend. How many pencils does "
    "he have left?",
    "Write a Python function that counts the vowels in a string.",
)


@pytest.fixture(scope="module")
def model(smollm2: Path) -> d3d.Model:
    return d3d.load("smollm2-135m", dtype="float32")


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize(
    "sampling", [{}, {"temperature": 0.8, "seed": 5, "top_p": 0.95, "repetition_penalty": 1.1}]
)
def test_serial_and_fused_ids_equal_plain_ids(
    model: d3d.Model, prompt: str, sampling: dict[str, float]
) -> None:
    plain = model.generate(prompt, mode="plain", max_tokens=24, **sampling)
    for mode in ("serial", "fused"):
        drafted = model.generate(prompt, mode=mode, max_tokens=24, **sampling)
        assert drafted.token_ids == plain.token_ids
        assert drafted.text == plain.text
        assert drafted.speculation is not None
        assert drafted.speculation.rounds < len(drafted.token_ids) - 1, (
            "nothing that was drafted was ever kept"
        )


def test_clean_rows_of_a_fused_pass_are_those_of_a_plain_pass(model: d3d.Model) -> None:
    assert model.drafter is not None
    ids = model.encode(PROMPTS[0])
    transformer = model.parts.target.model
    plain, fused = (
        NativeTarget(transformer),
        FusedTarget(NativeTarget(transformer), model.drafter, 3, 16),
    )
    request, draft = Request(ids[:-4]), Draft(tuple(ids[-3:]))
    for target in (plain, fused):
        target.prefill([request], len(ids))
    request.token_ids.append(ids[-4])
    (expected,) = plain.verify([request], [draft])
    fused.set_plan(request, RowPlan(3, (4, 3, 3, 2)))
    (clean,) = fused.verify([request], [draft])
    difference = (clean.logits() - expected.logits()).abs().max()
    assert difference < 1e-5 * expected.logits().abs().max()


def test_the_shipped_drafter_is_worth_its_pass(model: d3d.Model) -> None:
    result = model.generate(PROMPTS[0], mode="serial", max_tokens=96)
    assert result.speculation is not None
    assert result.speculation.acceptance_length > 2.3
    assert result.speculation.acceptance_at[0] > 0.9, "the anchor's row is the target's own"


def test_the_shipped_drafter_shares_the_targets_weights(model: d3d.Model) -> None:
    assert model.drafter is not None
    assert (
        model.drafter.transformer.embedding.data_ptr()
        == model.target.transformer.embedding.data_ptr()
    )


def test_the_shipped_drafter_is_small_and_says_where_it_comes_from(smollm2: Path) -> None:
    from d3d.hub.presets import PRESETS

    directory = PRESETS["smollm2-135m"].drafter_directory()
    assert sum(file.stat().st_size for file in directory.iterdir()) <= 24 * 2**20
    assert read_config(directory).base.source == "smollm2-135m"
    assert "Apache-2.0" in (directory / "NOTICE.md").read_text()
    assert {"data", "command", "commit", "measured"} <= json.loads(
        (directory / "provenance.json").read_text()
    ).keys()


def test_the_answer_makes_sense(model: d3d.Model) -> None:
    assert (
        "Paris"
        in model.generate("What is the capital of France?", mode="plain", max_tokens=24).text
    )


@pytest.mark.parametrize(
    ("name", "anchor_slot"), [("smollm2-135m-fast", True), ("smollm2-135m-fused", False)]
)
def test_a_thinned_preset_is_small_and_says_where_it_comes_from(
    smollm2: Path, name: str, anchor_slot: bool
) -> None:
    from d3d.hub.names import resolve_drafter

    directory = resolve_drafter(name)
    assert sum(file.stat().st_size for file in directory.iterdir()) <= 24 * 2**20
    config = read_config(directory)
    assert config.base.source == "smollm2-135m"
    assert config.drafter.anchor_slot == anchor_slot
    assert config.drafter.slot_layers is not None
    assert len(config.drafter.slot_layers) < len(config.drafter.kept_layers)
    assert "Apache-2.0" in (directory / "NOTICE.md").read_text()
    assert {"data", "command", "commit", "measured"} <= json.loads(
        (directory / "provenance.json").read_text()
    ).keys()


def test_the_fast_preset_was_tuned_with_the_drafter_that_it_brings(smollm2: Path) -> None:
    tuned = read_preset("smollm2-135m-fast").tuned
    assert tuned is not None
    assert (
        d3d.load("smollm2-135m-fast", dtype="bfloat16").drafter_fingerprint
        == tuned.drafter_fingerprint
    )


@pytest.mark.parametrize(
    ("name", "mode", "tokens_a_round"),
    [("smollm2-135m-fast", "serial", 2), ("smollm2-135m-fused", "fused", 1.5)],
)
def test_a_thinned_preset_gives_the_targets_own_ids_in_fewer_passes(
    smollm2: Path, name: str, mode: str, tokens_a_round: float
) -> None:
    thinned = d3d.load(name, dtype="float32")
    question = (
        "A baker sells 24 rolls in the morning and twice as many in the afternoon. "
        "How many rolls is that?"
    )
    plain, drafted = (
        thinned.generate(question, mode=way, max_tokens=32) for way in ("plain", None)
    )
    assert drafted.token_ids == plain.token_ids
    assert drafted.speculation is not None
    assert drafted.speculation.mode == mode
    assert drafted.speculation.acceptance_length > tokens_a_round
