"""Encoded text that comes in and goes out: standard streams and files."""

from __future__ import annotations

import codecs
import io
import sys


def prepare_standard_streams() -> None:
    """Take a byte-order mark off standard input, and write what the encoding of standard output
    lacks as an escape such as `\\u2019`, so that no answer is lost to it."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    if isinstance(sys.stdin, io.TextIOWrapper) and _is_utf8(sys.stdin.encoding):
        sys.stdin.reconfigure(encoding="utf-8-sig")


def _is_utf8(encoding: str) -> bool:
    return codecs.lookup(encoding).name == "utf-8"


def without_line_end(text: str) -> str:
    """The text without its last line end, of Unix or Windows."""
    return text.removesuffix("\n").removesuffix("\r")
