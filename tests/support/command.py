"""Run `d3d` in this process, as a user's shell would see it."""

from __future__ import annotations

import contextlib
import io
import json
import sys
from typing import Any, NamedTuple
from unittest import mock

from d3d.cli.app import main


class Outcome(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def record(self) -> dict[str, Any]:
        """The JSON object in the last line of standard output."""
        record: dict[str, Any] = json.loads(self.out.splitlines()[-1])
        return record

    def is_refusal(self, *words: str) -> bool:
        """Exit code 2, nothing on standard output, one line on standard error that holds these
        words."""
        one_line = self.err.startswith("d3d: error: ") and self.err.count("\n") == 1
        return (
            self.code == 2
            and self.out == ""
            and one_line
            and all(word in self.err for word in words)
        )


def d3d(*arguments: object, stdin: str | bytes = "") -> Outcome:
    content = stdin.encode() if isinstance(stdin, str) else stdin
    given = io.TextIOWrapper(io.BytesIO(content), encoding="utf-8", newline="\n")
    out, err = io.StringIO(newline=""), io.StringIO()
    code: object = 0
    with (
        mock.patch.object(sys, "argv", ["d3d", *map(str, arguments)]),
        mock.patch.object(sys, "stdin", given),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            main()
        except SystemExit as exit_:
            code = exit_.code or 0
    assert isinstance(code, int)
    return Outcome(code, out.getvalue(), err.getvalue())
