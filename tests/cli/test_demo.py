"""`d3d demo` with the tiny model in the place of the preset's."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from d3d.cli.demo import QUESTIONS, Pair, figures
from d3d.hub.presets import PRESETS
from d3d.results import GenerationResult, Speculation, Timing, Usage
from support.command import d3d


@pytest.fixture(autouse=True)
def _preset(tiny_target: Path, tiny_drafter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("smollm2-135m", "tiny"):
        monkeypatch.setitem(
            PRESETS, name, replace(PRESETS["smollm2-135m"], name=name, drafter=str(tiny_drafter))
        )
    monkeypatch.setattr("d3d.hub.names._preset_target", lambda _preset: tiny_target)


def test_three_questions_are_answered_twice_and_the_ids_are_equal() -> None:
    outcome = d3d("demo", "--max-tokens", 16)
    assert outcome.code == 0, outcome.err
    lines = outcome.out.splitlines()
    assert lines[-1] == "token-identical: yes"
    assert len(QUESTIONS) == 3
    assert all(question in outcome.out for question in QUESTIONS)
    assert lines.count("[plain]") == lines.count("[serial]") == 3
    table = outcome.out[outcome.out.index("float32 on cpu, greedy") :]
    assert all(word in table for word in ("plain", "serial", "ratio", "acceptance", "all"))


def test_model_draft_length_device_and_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    from d3d.api import Model

    seen = []
    real = Model.stream

    def noted(self: Model, prompt: object, **options: object) -> object:
        seen.append(options)
        return real(self, prompt, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(Model, "stream", noted)
    outcome = d3d(
        "demo",
        "--model",
        "tiny",
        "--max-tokens",
        5,
        "--draft-length",
        2,
        "--device",
        "cpu",
        "--dtype",
        "bfloat16",
    )
    assert outcome.code == 0, outcome.err
    assert "tiny, bfloat16 on cpu" in outcome.out
    assert outcome.out.splitlines()[-1].split(" (")[0] in (
        "token-identical: yes",
        "token-identical: rounding",
    )
    assert {options["draft_length"] for options in seen if options["method"] == "serial"} == {2}
    assert [options["max_tokens"] for options in seen] == [5] * 6


def test_answers_of_one_token_leave_the_times_open() -> None:
    outcome = d3d("demo", "--max-tokens", 1)
    assert outcome.code == 0, outcome.err
    assert outcome.out.splitlines()[-1] == "token-identical: yes"


def test_a_difference_is_called_no(monkeypatch: pytest.MonkeyPatch) -> None:
    """A target that is wrong about what was drafted."""
    from d3d.engine import engine
    from d3d.engine.sampling import Verdict

    real = engine.sample_match
    monkeypatch.setattr(
        engine,
        "sample_match",
        lambda rows, draft, request, _: (
            Verdict(tuple(draft), 80) if len(draft) else real(rows, draft, request, None)
        ),
    )
    outcome = d3d("demo", "--max-tokens", 16)
    assert outcome.out.splitlines()[-1] == "token-identical: no"
    assert outcome.code == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--model", "nope"), "no model 'nope': it is neither"),
        (("--max-tokens", 0), "max_tokens"),
        (("--draft-length", 99), "draft_length: 99"),
        (("--dtype", "x"), "dtype"),
        (("--device", "x"), "device"),
    ],
    ids=str,
)
def test_bad_input_gets_one_clear_line(arguments: tuple[object, ...], words: str) -> None:
    assert d3d("demo", *arguments).is_refusal(words)


def test_the_total_weighs_tokens_not_questions() -> None:
    def result(tokens: int, tpot: float | None, rounds: int = 0) -> GenerationResult:
        spec = (
            Speculation("serial", rounds, (tokens - 1) / rounds, 0.5, (), (), 0, 4, 1)
            if rounds
            else None
        )
        return GenerationResult(
            "", (1,) * tokens, "stop", Usage(1, tokens), Timing(0.1, tpot, 1.0), spec, ()
        )

    pairs = [
        Pair("a", result(101, 0.03), result(101, 0.02, rounds=50)),
        Pair("b", result(11, 0.06), result(11, 0.01, rounds=2)),
    ]
    assert figures(pairs) == ["112", "32.7", "19.1", "1.71", "2.12"]
    assert figures([Pair("c", result(1, None), result(1, None))]) == ["1", "-", "-", "-", "-"]
