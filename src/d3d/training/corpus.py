"""The training corpus: texts that the target itself has written, one JSON object a line.

A row: {"prompt_ids": [...], "answer_ids": [...], "source": "...", "temperature": 0.0, "seed": 0}. The first line is the
manifest, which names the tokenizer; a corpus is refused for a model with another one. A last line without its end is what a
killed writer leaves; it is not read, and goes when the corpus is continued.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, NamedTuple

from pydantic import Field, TypeAdapter, ValidationError

from d3d.core.errors import InvalidCheckpoint, InvalidRequest
from d3d.models.fingerprint import tokenizer_fingerprint
from d3d.models.open_model import OpenModel

TokenIds = list[Annotated[int, Field(strict=True, ge=0)]]


class Sample(NamedTuple):
    """One prompt and the target's answer to it, as token ids."""

    prompt_ids: TokenIds
    answer_ids: TokenIds
    source: str
    temperature: float
    seed: int

    @property
    def token_ids(self) -> list[int]:
        return self.prompt_ids + self.answer_ids


SAMPLE = TypeAdapter(Sample)


def read_corpus(path: Path, tokenizer_fingerprint: str | None = None) -> list[Sample]:
    """Raises InvalidRequest for a missing or malformed file, InvalidCheckpoint where the tokenizer is another one."""
    if not path.is_file():
        raise InvalidRequest(f"{path}: no such corpus; make one with `d3d data`")
    lines = read_lines(path)
    manifest = _manifest(path, next(lines, (1, ""))[1])
    if tokenizer_fingerprint not in (None, manifest["tokenizer"]):
        raise InvalidCheckpoint(
            f"{path} was written with another tokenizer (fingerprint {str(manifest['tokenizer'])[:12]}, the model has "
            f"{str(tokenizer_fingerprint)[:12]}); write one with this model"
        )
    return [_sample(path, number, line) for number, line in lines]


def open_corpus(path: Path, model: OpenModel) -> set[tuple[tuple[int, ...], float]]:
    """Start a corpus, or go on with one that the same tokenizer wrote: which (prompt ids, temperature) it holds already."""
    tokenizer = tokenizer_fingerprint(model.tokenizer)
    if path.exists() and drop_torn_line(path):
        return {(tuple(sample.prompt_ids), sample.temperature) for sample in read_corpus(path, tokenizer)}
    path.parent.mkdir(parents=True, exist_ok=True)
    manifest = {"target": model.source, "target_fingerprint": model.fingerprint, "tokenizer": tokenizer}
    path.write_text(json.dumps(manifest) + "\n", encoding="utf-8")
    return set()


def append_samples(path: Path, samples: Iterable[Sample]) -> None:
    with path.open("a", encoding="utf-8") as file:
        for sample in samples:
            file.write(json.dumps(sample._asdict()) + "\n")


def read_lines(path: Path) -> Iterator[tuple[int, str]]:
    """The whole lines of a file of JSON lines with their numbers, from 1. Raises InvalidRequest where it is not UTF-8 text."""
    number = 0
    try:
        with path.open(encoding="utf-8", newline="\n") as file:
            for number, line in enumerate(file, 1):
                if line.endswith("\n"):
                    yield number, line
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"{path}, behind line {number}: it can't be read ({error})") from error


def drop_torn_line(path: Path) -> int:
    """Cut off what stands behind the last line's end, so that the next line starts on its own. Returns the size that is left."""
    content = path.read_bytes()
    size = content.rfind(b"\n") + 1
    if size < len(content):
        with path.open("r+b") as file:
            file.truncate(size)
    return size


def _manifest(path: Path, line: str) -> dict[str, object]:
    try:
        manifest = json.loads(line)
    except json.JSONDecodeError as error:
        raise InvalidRequest(f"{path}, line 1: not JSON ({error}); the first line of a corpus is its manifest") from error
    if not isinstance(manifest, dict) or not isinstance(manifest.get("tokenizer"), str):
        raise InvalidRequest(f"{path}, line 1: not a corpus manifest; make a corpus with `d3d data`")
    return manifest


def _sample(path: Path, number: int, line: str) -> Sample:
    try:
        return SAMPLE.validate_json(line)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise InvalidRequest(f"{path}, line {number}: {where + ': ' if where else ''}{first['msg']}") from error
