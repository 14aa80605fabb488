"""Errors that a user can act on. Each message says what is wrong, where, and what to do."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


class D3DError(Exception):
    """Base of all errors that d3d raises on purpose; the command line prints it as one line and
    exits with 2."""


class InvalidRequest(D3DError):
    """A request that can't be served: an empty prompt, too long a prompt, an impossible
    parameter."""


class InvalidCheckpoint(D3DError):
    """A model directory, drafter or download that is damaged, incomplete, foreign or of an
    unsupported kind."""


class MissingExtra(D3DError):
    """An optional dependency is absent; the message carries the line that installs it."""


class Disconnected(Exception):  # no D3DError: whoever uses a line has to deal with its end
    """The other end of a line is gone."""


class WorkerFailed(D3DError):
    """A draft worker that could not be started."""


def first_problem(error: Any, known: Iterable[str] = ()) -> str:
    """The first problem of a pydantic ValidationError, in one line that names the field.

    known: the fields that there are, listed (if any) when an unknown one was given."""
    first = error.errors()[0]
    name = ".".join(map(str, first["loc"]))
    if first["type"] == "extra_forbidden":
        fields = ", ".join(known)
        return f"{name}: there is no such key" + (f"; there are: {fields}" if fields else "")
    message = str(first["msg"]).removeprefix("Value error, ")
    value = first.get("input")
    if isinstance(value, int | float | str) and len(repr(value)) < 80:
        message = message.replace("Input should", f"{value!r} should", 1)
    return f"{name}: {message}" if name else message
