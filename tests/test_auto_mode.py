"""`mode="auto"` from Python and from the command line, with a tiny model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import d3d
from d3d.api import Model
from d3d.errors import InvalidRequest
from d3d.methods.auto.chooser import PLAIN_ROUNDS
from support.command import d3d as command
from support.tiny_model import write_tiny_drafter

PROMPT = "how are you?"
LONG = {"max_tokens": 60, "ignore_eos": True}


@pytest.fixture(scope="module")
def model(tiny_target: Path, tiny_drafter: Path) -> Model:
    return d3d.load(str(tiny_target), tiny_drafter, device="cpu", dtype="float32")


@pytest.mark.parametrize(
    "sampling",
    [{}, {"temperature": 0.9, "seed": 11, "repetition_penalty": 1.2}],
    ids=["greedy", "sampled"],
)
def test_the_answer_is_plains_and_the_record_says_what_was_chosen(
    sampling: dict[str, Any], model: Model
) -> None:
    plain = model.generate(PROMPT, mode="plain", **LONG, **sampling)
    for _ in range(2):
        result = model.generate(PROMPT, mode="auto", **LONG, **sampling)
        assert (result.token_ids, result.text) == (plain.token_ids, plain.text)
        record = json.loads(json.dumps(result.to_dict(), allow_nan=False))["speculation"]
        assert record["mode"] == "auto"
        assert record["auto"].keys() == {"mode", "why", "rounds", "tpot_s", "left_out"}
        assert record["auto"]["mode"] in ("plain", "serial", "fused", "async")
        assert "ms a token" in record["auto"]["why"]
        assert sum(record["auto"]["rounds"].values()) <= record["rounds"]
    assert record["auto"]["rounds"].get("plain", 0) < 60


def test_the_first_rounds_are_plain_until_something_is_known(
    tiny_target: Path, tiny_drafter: Path
) -> None:
    fresh = d3d.load(str(tiny_target), tiny_drafter, device="cpu", dtype="float32")
    first = fresh.generate(PROMPT, mode="auto", **LONG)
    assert [stats.draft_length for stats in first.rounds[:PLAIN_ROUNDS]] == [0] * PLAIN_ROUNDS


def test_without_a_drafter_it_is_plain_and_says_why(tiny_target: Path) -> None:
    bare = d3d.load(str(tiny_target), device="cpu", dtype="float32")
    result = bare.generate(PROMPT, mode="auto", **LONG)
    assert result.token_ids == bare.generate(PROMPT, mode="plain", **LONG).token_ids
    choice = result.to_dict()["speculation"]["auto"]
    assert choice["mode"] == "plain"
    assert set(choice["left_out"].values()) == {"there is no drafter"}
    with pytest.raises(
        InvalidRequest, match="draft_length: auto leaves serial out here: there is no drafter"
    ):
        bare.generate(PROMPT, mode="auto", draft_length=4)


def test_a_drafter_with_weights_of_its_own_leaves_fused_mode_out(
    tiny_target: Path, tmp_path: Path
) -> None:
    own = d3d.load(
        str(tiny_target),
        write_tiny_drafter(tmp_path / "own", tiny_target, scope=None),
        device="cpu",
        dtype="float32",
    )
    result = own.generate(PROMPT, mode="auto", **LONG)
    assert result.token_ids == own.generate(PROMPT, mode="plain", **LONG).token_ids
    assert "deltas at slots only" in result.to_dict()["speculation"]["auto"]["left_out"]["fused"]
    with pytest.raises(InvalidRequest, match="rows: auto leaves fused out"):
        own.generate(PROMPT, mode="auto", rows=8)


def test_a_named_placement_makes_async_mode_a_candidate(model: Model) -> None:
    plain = model.generate(PROMPT, mode="plain", max_tokens=120, ignore_eos=True)
    try:
        for _ in range(3):
            result = model.generate(
                PROMPT, mode="auto", placement="thread", outcomes=2, max_tokens=120, ignore_eos=True
            )
            assert result.token_ids == plain.token_ids
            assert "async" not in result.to_dict()["speculation"]["auto"]["left_out"]
    finally:
        model.close()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"draft_length": 7}, "draft_length: 7"),
        ({"num_denoise_steps": 9}, "num_denoise_steps: 9"),
        ({"placement": "cellar"}, "placement: 'cellar'"),
        ({"placement": "thread", "outcomes": 0}, "outcomes: 0"),
    ],
    ids=str,
)
def test_what_is_out_of_range_is_refused(options: dict[str, Any], words: str, model: Model) -> None:
    with pytest.raises(InvalidRequest, match=words):
        model.stream(PROMPT, mode="auto", **options)


def test_the_command_has_a_line_for_people_and_one_for_programs(
    tiny_target: Path, tiny_drafter: Path
) -> None:
    given = (
        "generate",
        "--prompt",
        PROMPT,
        "--target",
        tiny_target,
        "--drafter",
        tiny_drafter,
        "--dtype",
        "float32",
        "--device",
        "cpu",
    )
    outcome = command(*given, "--mode", "auto", "--json", "--max-tokens", 40)
    assert outcome.code == 0, outcome.err
    assert f"auto chose {outcome.record['speculation']['auto']['mode']}" in outcome.err
    assert "\nauto: " in outcome.err
    chat = command("chat", *given[3:], "--mode", "auto", stdin="hello\n")
    assert "auto: " in chat.err
    fast = command(
        "chat",
        *given[3:],
        "--mode",
        "async",
        "--placement",
        "thread",
        "--outcomes",
        2,
        stdin="hello\n",
    )
    assert fast.code == 0, fast.err
    assert "speculation: async" in fast.err
