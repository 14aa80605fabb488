"""Reading what users give: paths, text, JSON and YAML. Whatever is wrong with a file becomes one
error of d3d that names it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from d3d.errors import InvalidCheckpoint, InvalidRequest, first_problem
from d3d.json_text import to_json

MOST_THREADS = 1024
"""Upper bound of a number of threads, so that a wrong one is refused, not started."""

PACKED = (".gz", ".bz2", ".xz", ".zst", ".zip")
Model = TypeVar("Model", bound=BaseModel)
Kind = type[InvalidRequest] | type[InvalidCheckpoint]


def input_path(name: str | Path, kind: Kind = InvalidRequest) -> Path:
    """Path of this name, ~ expanded. Raises `kind` for a name that is empty or that no file can
    have, a loop of links, and a directory that can't be searched."""
    if not str(name).strip():
        raise kind("a name is empty; name a file or a directory")
    try:
        path = Path(name).expanduser()
        with suppress(FileNotFoundError, NotADirectoryError):
            path.stat()
    except (OSError, ValueError, RuntimeError) as error:  # too long; a null byte; an unknown ~user
        raise kind(f"{_short(str(name))}: {_reason(error)}") from error
    return path


def refuse_packed(path: Path) -> None:
    """Raise InvalidRequest for the name of a packed file, where only plain text is read and
    written."""
    if path.suffix.lower() in PACKED:
        raise InvalidRequest(
            f"{path}: packed files are not read or written here; take a name without {path.suffix}"
        )


def read_text(path: Path, advice: str = "", kind: Kind = InvalidRequest) -> str:
    """UTF-8 text of a file, without a byte-order mark. Raises `kind` if it can't be read."""
    refuse_packed(path)
    with _naming(path, "", advice, kind):
        return path.read_text(encoding="utf-8-sig")


def read_json(path: Path, advice: str = "", kind: Kind = InvalidRequest) -> Any:
    """Value of a JSON file. Raises `kind` if it can't be read."""
    text = read_text(path, advice, kind)
    with _naming(path, " as JSON", advice, kind):
        return json.loads(text)


def read_object(path: Path, advice: str = "", kind: Kind = InvalidRequest) -> dict[str, Any]:
    """The object of a JSON file. Raises `kind` if it can't be read or holds something else."""
    content = read_json(path, advice, kind)
    if not isinstance(content, dict):
        raise kind(_sentence(f"{path} must hold a JSON object", advice))
    return content


def read_yaml(path: Path, advice: str = "", kind: Kind = InvalidRequest) -> Any:
    """Value of a YAML or JSON file. Raises `kind` if it can't be read."""
    text = read_text(path, advice, kind)
    with _naming(path, " as YAML", advice, kind):
        return yaml.safe_load(text)


def parse_json(text: str, where: str, advice: str = "", kind: Kind = InvalidRequest) -> Any:
    """Value of JSON text. where: its place, for the message. Raises `kind`."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise kind(_sentence(f"{where}: it is not JSON ({_reason(error)})", advice)) from error


def json_or_none(text: str | bytes) -> Any:
    """Value of JSON text, None if it is damaged: for lines that may be torn."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def validated(
    model: type[Model], content: Any, where: object, advice: str = "", kind: Kind = InvalidRequest
) -> Model:
    """A model made of JSON values, each of exactly its field's type. Raises `kind` that names the
    first wrong field."""
    try:
        text = to_json(content, default=str)
    except (TypeError, ValueError, RecursionError) as error:  # YAML can say more than JSON
        raise kind(_sentence(f"{where}: {_reason(error)}", advice)) from error
    try:
        return model.model_validate_json(text, strict=True)
    except ValidationError as error:
        known = model.model_fields if len(error.errors()[0]["loc"]) == 1 else ()
        problem = f"{where}: {first_problem(error, known)}"
        raise kind(_sentence(problem, advice)) from error


@contextmanager
def within(place: object) -> Iterator[None]:
    """Begin the message of an invalid input with the place where it arose."""
    try:
        yield
    except (InvalidRequest, InvalidCheckpoint) as error:
        raise type(error)(f"{place}: {error}") from error


@contextmanager
def _naming(path: Path, how: str, advice: str, kind: Kind) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        problem = f"{_short(str(path))} can't be read{how}: {_reason(error)}"
        raise kind(_sentence(problem, advice)) from error


def _reason(error: Exception) -> str:
    if isinstance(error, OSError):
        return error.strerror or str(error)
    if isinstance(error, UnicodeDecodeError):
        return f"it is not UTF-8 text ({error.reason} at byte {error.start})"
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    return " ".join(str(error).split())


def _short(name: str) -> str:
    return name if len(name) <= 200 else f"{name[:100]}..."


def _sentence(problem: str, advice: str) -> str:
    return f"{problem}; {advice}" if advice else problem
