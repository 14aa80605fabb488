"""Standard streams in other encodings: answers are never lost, marks are never text."""

from __future__ import annotations

import contextlib
import io
import json
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from d3d.cli.app import main
from support.command import d3d


@pytest.fixture
def given(tiny_target: Path) -> tuple[object, ...]:
    sampling = ("--max-tokens", 12, "--temperature", 8, "--seed", 5)
    return ("generate", "--target", tiny_target, "--dtype", "float32", "--json", *sampling)


def written(encoding: str, *arguments: object) -> bytes:
    out = io.TextIOWrapper(io.BytesIO(), encoding=encoding, newline="")
    with (
        mock.patch.object(sys, "argv", ["d3d", *map(str, arguments)]),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(io.StringIO()),
        pytest.raises(SystemExit),
    ):
        main()
    out.flush()
    content: Any = out.buffer
    return bytes(content.getvalue())


@pytest.mark.parametrize("encoding", ["latin-1", "cp1252"])
def test_what_an_encoding_lacks_is_escaped(encoding: str, given: tuple[object, ...]) -> None:
    text = d3d(*given, "hello").record["text"]
    with pytest.raises(UnicodeEncodeError):
        text.encode(encoding)
    content = written(encoding, *given, "hello")
    shown, line = content.rstrip(b"\n").rsplit(b"\n", 1)
    assert shown == text.encode(encoding, "backslashreplace")
    assert json.loads(line)["text"] == text


def test_marks_and_line_ends_of_standard_input_are_no_text(given: tuple[object, ...]) -> None:
    expected = d3d(*given, "hello").record["usage"]
    for content in ("\ufeffhello", "hello\r\n", "\ufeffhello\r\n", "hello\r"):
        assert d3d(*given, "-", stdin=content).record["usage"] == expected
    assert d3d(*given, "-", stdin="hello\r\n\r\n").record["usage"] != expected
    assert d3d(*given, "-", stdin="hello".encode("utf-16")).is_refusal("not UTF-8 text")
    assert d3d(*given, "-", stdin="\ufeff\n").is_refusal("prompt: it is empty")


def test_a_mark_before_the_first_turn_of_a_chat_is_no_text(tiny_target: Path) -> None:
    asked = ("chat", "--target", tiny_target, "--dtype", "float32", "--max-tokens", 1)
    outcome = d3d(*asked, stdin="\ufeff/exit\n")
    assert (outcome.code, outcome.out) == (0, "")
