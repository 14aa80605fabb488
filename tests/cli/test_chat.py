"""`d3d chat` on a tiny model: what the model is shown, turn by turn, and what every flag does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from d3d.api import Model
from support.command import Outcome, d3d


@pytest.fixture
def chat(tiny_target: Path, tiny_drafter: Path) -> Any:
    """`d3d chat` with these lines on standard input."""

    def run(*arguments: object, lines: str | bytes) -> Outcome:
        given = [str(argument) for argument in arguments]
        defaults = {"--max-tokens": "6", "--dtype": "float32", "--target": str(tiny_target)}
        if "plain" not in given:
            defaults["--drafter"] = str(tiny_drafter)
        extra = [
            part for name, value in defaults.items() if name not in given for part in (name, value)
        ]
        return d3d("chat", *given, *extra, stdin=lines)

    return run


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[dict[str, str]], dict[str, Any]]]:
    """Every conversation that reached the model, with its options."""
    calls: list[tuple[list[dict[str, str]], dict[str, Any]]] = []
    real = Model.stream

    def noted(self: Model, prompt: Any, **options: Any) -> Any:
        calls.append(([dict(message) for message in prompt], options))
        return real(self, prompt, **options)

    monkeypatch.setattr(Model, "stream", noted)
    return calls


def roles(messages: list[dict[str, str]]) -> list[str]:
    return [message["role"] for message in messages]


def test_a_conversation_grows_turn_by_turn(chat: Any, seen: list[Any]) -> None:
    outcome = chat(lines="hello\n\n  how are you?  \n")
    assert outcome.code == 0, outcome.err
    assert [roles(messages) for messages, _ in seen] == [["user"], ["user", "assistant", "user"]]
    second = seen[1][0]
    assert [message["content"] for message in second if message["role"] == "user"] == [
        "hello",
        "how are you?",
    ]
    answers = [
        outcome.out[: len(second[1]["content"])],
        outcome.out[len(second[1]["content"]) + 1 :],
    ]
    assert second[1]["content"] == answers[0]
    assert outcome.err.count("tokens, ") == 2


def test_new_starts_over_and_keeps_the_system_message(chat: Any, seen: list[Any]) -> None:
    chat("--system", "be brief", lines="one\n/new\ntwo\n")
    assert [roles(messages) for messages, _ in seen] == [["system", "user"]] * 2
    assert seen[1][0] == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "two"},
    ]


def test_exit_and_the_end_of_input_end_it(chat: Any, seen: list[Any]) -> None:
    assert chat(lines="one\n/exit\ntwo\n").code == 0
    assert len(seen) == 1
    assert chat(lines="").code == 0
    assert chat(lines="no newline").code == 0
    assert len(seen) == 2


def test_plain_and_serial_say_the_same(chat: Any) -> None:
    lines = "hello\nand then?\n"
    plain, serial = chat("--mode", "plain", lines=lines), chat("--mode", "serial", lines=lines)
    assert plain.out == serial.out
    assert "off (plain mode)" in plain.err
    assert "serial" in serial.err


def test_flags_reach_the_model(chat: Any, seen: list[Any]) -> None:
    flags = (
        "--temperature",
        0.7,
        "--top-p",
        0.9,
        "--seed",
        5,
        "--draft-length",
        3,
        "--denoise-steps",
        2,
        "--draft-confidence",
        0.25,
        "--lookup",
        3,
        "--least-kept",
        0.5,
        "--no-thinking",
        "--max-tokens",
        4,
    )
    assert chat(*flags, lines="hello\n").code == 0
    wanted = {
        "temperature": 0.7,
        "top_p": 0.9,
        "seed": 5,
        "draft_length": 3,
        "num_denoise_steps": 2,
        "draft_confidence": 0.25,
        "lookup": 3,
        "least_kept": 0.5,
        "thinking": False,
        "max_tokens": 4,
    }
    assert seen[0][1] == wanted | {"method": None}


def test_fused_says_what_plain_says(chat: Any) -> None:
    plain, fused = (
        chat("--mode", "plain", lines="hello\nmore\n"),
        chat("--mode", "fused", "--rows", 9, lines="hello\nmore\n"),
    )
    assert fused.code == 0
    assert fused.out == plain.out
    assert "speculation: fused" in fused.err


def test_a_seed_repeats_a_sampled_conversation(chat: Any) -> None:
    runs = [
        chat("--temperature", 1.0, "--seed", seed, "--max-tokens", 12, lines="hello\nmore\n").out
        for seed in (1, 1, 2)
    ]
    assert runs[0] == runs[1] != runs[2]


def test_color_paints_and_loses_nothing(chat: Any) -> None:
    colored = chat("--color", "--device", "cpu", lines="hello\n")
    assert "\x1b[1m" in colored.out
    assert "drafted and kept" in colored.err


def test_a_turn_that_no_longer_fits_is_taken_back(chat: Any, seen: list[Any]) -> None:
    outcome = chat(lines="hello\n" + "the cat " * 300 + "\nstill there?\n")
    assert outcome.code == 0
    assert "leave no room" in outcome.err
    assert "/new starts over" in outcome.err
    assert [message["content"] for message in seen[-1][0]][-1] == "still there?"
    assert len(seen[-1][0]) == 3


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--max-tokens", 0), "max_tokens"),
        (("--temperature", -1), "temperature"),
        (("--top-p", 2), "top_p"),
        (("--seed", -1), "seed"),
        (("--draft-length", 9), "draft_length: 9"),
        (("--denoise-steps", 0), "num_denoise_steps: 0"),
        (("--mode", "turbo"), "method: 'turbo'"),
        (("--dtype", "int4"), "dtype"),
        (("--device", "tpu"), "device"),
        (("--model", "smollm2-135m"), "name two targets"),
        (("--target", "nonsense"), "no model 'nonsense'"),
        (("--drafter", "nonsense"), "no drafter 'nonsense'"),
    ],
    ids=str,
)
def test_bad_input_gets_one_clear_line(
    arguments: tuple[object, ...], words: str, chat: Any
) -> None:
    assert chat(*arguments, lines="hello\n").is_refusal(words)


def test_foreign_options_are_refused_before_the_first_turn(chat: Any) -> None:
    assert chat("--rows", "4", lines="").is_refusal("rows: method serial has no such option")


def test_input_that_is_no_text(chat: Any) -> None:
    assert chat(lines=b"\xff\xfe\n").is_refusal("standard input is not UTF-8")


def test_ctrl_c_ends_the_answer_and_not_the_conversation(
    chat: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from d3d.cli import show

    real, calls = show.stream_answer, []

    def interrupted_once(chunks: Any, **options: Any) -> Any:
        calls.append(chunks)
        if len(calls) == 1:
            raise KeyboardInterrupt
        return real(chunks, **options)

    monkeypatch.setattr(show, "stream_answer", interrupted_once)
    outcome = chat(lines="hello\nand then?\n")
    assert outcome.code == 0
    assert len(calls) == 2
    assert "the turn is forgotten" in outcome.err


def test_an_unknown_command_is_no_message(chat: Any) -> None:
    outcome = chat(lines="/help\n")
    assert outcome.code == 0
    assert outcome.out == ""
    assert "there is no command /help" in outcome.err


def test_input_that_is_no_text_is_refused(chat: Any) -> None:
    assert chat("--system", "\udcff", lines="hello\n").is_refusal("not valid Unicode")
