"""`d3d plan` as a shell sees it, with costs from data sheets; what it needs a profile for is in
tests/lab/plan/test_profile.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from d3d.methods.async_.config import DEFAULT_OUTCOMES
from support.command import d3d

H100 = ("--datasheet", "h100")
MEAN = ("--acceptance-length", 7.88, "--draft-length", 16)


def modes(*arguments: object) -> dict[str, dict[str, Any]]:
    outcome = d3d("plan", *arguments, "--json")
    assert outcome.code == 0, outcome.err
    return {row["mode"]: row for row in outcome.record["tables"][0]["rows"]}


@pytest.mark.slow
def test_a_second_device_hides_what_one_does_not() -> None:
    two, one = (
        modes(*H100, "--devices", count, *MEAN, "--hit-rate", 1, "--outcomes", 8)
        for count in (2, 1)
    )
    name = "async 16, 8 outcomes"
    assert two["plain"] == one["plain"]
    assert two["serial 16"] == one["serial 16"]
    assert (
        float(two[name]["over plain"])
        > float(two["serial 16"]["over plain"])
        > float(one[name]["over plain"])
    )


@pytest.mark.slow
def test_without_a_hit_rate_both_ends_are_told() -> None:
    outcome = d3d("plan", *H100, *MEAN, "--json")
    notes = [
        row["note"]
        for row in outcome.record["tables"][0]["rows"]
        if row["mode"].startswith("async")
    ]
    assert len(notes) == 2
    assert "if every successor were there" in notes[0]
    assert "if none were" in notes[1]


def test_the_default_budget_of_outcomes_is_that_of_generate() -> None:
    assert f"async 16, {DEFAULT_OUTCOMES} outcomes" in modes(*H100, *MEAN, "--hit-rate", 1)


@pytest.mark.slow
def test_fewer_layers_make_drafting_cheaper() -> None:
    whole, thin = (modes(*H100, *MEAN, "--kept-layers", layers)["serial 16"] for layers in (36, 18))
    assert float(thin["ms a token"]) < float(whole["ms a token"])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((*MEAN,), "--profile FILE"),
        ((*H100, "--profile", "x.json", *MEAN), "one of the two"),
        (H100, "one of --trace"),
        ((*H100, "--histogram", "1,2", *MEAN), "not histogram and acceptance-length"),
        ((*H100, "--acceptance-length", 2), "--draft-length"),
        ((*H100, "--acceptance-length", 9, "--draft-length", 4), "acceptance length"),
        ((*H100, "--histogram", "a,b"), "list of counts"),
        ((*H100, "--histogram", "1,2", "--draft-length", 2), "draft_length"),
        ((*H100, "--devices", 3, *MEAN), "devices"),
        (("--datasheet", "abacus", *MEAN), "there are h100"),
        ((*H100, "--target", "x", *MEAN), "no shape"),
        ((*H100, "--drafter", "x", *MEAN), "no shape"),
        ((*H100, "--kept-layers", 40, *MEAN), "layers"),
        ((*H100, "--hit-rate", 2, *MEAN), "hit rate"),
        ((*H100, "--outcomes", 0, *MEAN), "outcomes"),
        ((*H100, "--bandwidth-share", 2, *MEAN), "bandwidth share"),
        ((*H100, "--trace", "nothing.json"), "can't be read"),
        (("--profile", "nothing.json", *MEAN), "can't be read"),
        (("--datasheet", "rtx4090", "--devices", 1, *MEAN), "do not fit"),
    ],
    ids=str,
)
def test_what_can_not_be_is_refused_in_one_line(
    arguments: tuple[object, ...], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert d3d("plan", *arguments).is_refusal(words)


def test_a_plain_answer_is_no_trace_to_plan_with(tmp_path: Path) -> None:
    record = {
        "usage": {"prompt_tokens": 3, "completion_tokens": 4},
        "timing": {"tpot_s": 0.1},
        "speculation": None,
    }
    file = tmp_path / "plain.json"
    file.write_text(json.dumps(record))
    assert d3d("plan", *H100, "--trace", file).is_refusal("nothing was drafted")
