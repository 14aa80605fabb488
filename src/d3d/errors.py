"""Errors that a user can act on. Each message names the problem, its place and a remedy."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


class D3DError(Exception):
    """Base class of d3d's own errors; the command line prints it as one line and exits with 2."""


class InvalidRequest(D3DError):
    """Request that can't be served: an empty or too long prompt, or an impossible parameter."""


class InvalidCheckpoint(D3DError):
    """Model directory, drafter or download that is damaged, incomplete, foreign or unsupported."""


class NotFinite(D3DError):
    """Numbers that are NaN or infinite where a tensor leaves a model."""

    def __init__(self, what: str, where: str, position: int | None = None, cause: str = "") -> None:
        """what: for example "the target's logits are"; where: the pass; position: index in the text
        of the token concerned; cause: what a diagnosis found, and a remedy."""
        super().__init__(what, where, position, cause)
        self.what, self.where, self.position, self.cause = what, where, position, cause

    def __str__(self) -> str:
        place = "" if self.position is None else f", for the token at position {self.position}"
        cause = f": {self.cause}" if self.cause else ""
        return f"{self.what} not finite (NaN or infinite) in {self.where}{place}{cause}"


class MissingExtra(D3DError):
    """Missing optional dependency; the message contains the command that installs it."""


class CantWrite(D3DError):
    """Output that could not be written: a full disk, or a place without permission. What was
    written before is whole."""


class Disconnected(Exception):  # no D3DError: whoever uses a line has to deal with its end
    """The other end of a connection is gone."""


class WorkerFailed(D3DError):
    """Draft worker that could not be started."""


def first_problem(error: Any, known: Iterable[str] = ()) -> str:
    """One-line description of a pydantic ValidationError's first problem, naming the field.

    known: valid field names, listed after an unknown one."""
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
