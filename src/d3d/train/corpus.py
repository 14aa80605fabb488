"""The training corpus: texts that the target itself has written, one JSON object a line.

A row: {"prompt_ids": [...], "answer_ids": [...], "source": "...", "temperature": 0.0, "seed": 0},
and `top` where the target's best logits lie beside it (`d3d.train.top_logits`). A file's first line
says who wrote it; a corpus is refused for a model with another tokenizer. A corpus is one such
file, or a directory of them (answers-00000.jsonl, ...). A last line without its end is what a
killed writer leaves; it is not read, and goes when the corpus is continued."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import Field, TypeAdapter, ValidationError

from d3d.errors import InvalidCheckpoint, InvalidRequest
from d3d.train.top_logits import TopLogits, TopReference, read_top_logits

TokenIds = list[Annotated[int, Field(strict=True, ge=0)]]

SHARDS = "answers-*.jsonl"


class Sample(NamedTuple):
    """One prompt and the target's answer to it, as token ids."""

    prompt_ids: TokenIds
    answer_ids: TokenIds
    source: str
    temperature: float
    seed: int
    top: TopReference | None = None
    """Where the target's best logits lie."""

    @property
    def token_ids(self) -> list[int]:
        return self.prompt_ids + self.answer_ids

    def top_logits(self) -> TopLogits | None:
        """The target's best logits at each answer token, or None where the corpus has none. Raises
        InvalidCheckpoint."""
        return None if self.top is None else read_top_logits(self.top, len(self.answer_ids))


SAMPLE = TypeAdapter(Sample)


def read_corpus(path: Path, tokenizer_fingerprint: str | None = None) -> list[Sample]:
    """All samples, in the order in which they were written. Raises InvalidRequest for a missing or
    malformed corpus, InvalidCheckpoint where the tokenizer is another one."""
    return [
        sample for file in corpus_files(path) for sample in _read_file(file, tokenizer_fingerprint)
    ]


def corpus_files(path: Path) -> list[Path]:
    """The files of a corpus, which may be a file or a directory of them. Raises InvalidRequest
    where there are none."""
    files = sorted(path.glob(SHARDS)) if path.is_dir() else [path] if path.is_file() else []
    if not files:
        raise InvalidRequest(f"{path}: no such corpus; make one with `d3d data`")
    return files


def corpus_identity(file: Path) -> dict[str, Any]:
    """The first line of a corpus file: who wrote it. Raises InvalidRequest where it is none."""
    return _identity(file, next(read_lines(file), (1, ""))[1])


def _read_file(file: Path, tokenizer_fingerprint: str | None) -> Iterator[Sample]:
    lines = read_lines(file)
    identity = _identity(file, next(lines, (1, ""))[1])
    if tokenizer_fingerprint not in (None, identity["tokenizer"]):
        raise InvalidCheckpoint(
            f"{file} was written with another tokenizer (fingerprint {str(identity['tokenizer'])[:12]}, the model has "
            f"{str(tokenizer_fingerprint)[:12]}); write one with this model"
        )
    for number, line in lines:
        sample = _sample(file, number, line)
        yield sample if sample.top is None else sample._replace(top=sample.top.beside(file))


def read_lines(path: Path) -> Iterator[tuple[int, str]]:
    """The whole lines of a file of JSON lines with their numbers, from 1. Raises InvalidRequest
    where it is not UTF-8 text."""
    number = 0
    try:
        with path.open(encoding="utf-8", newline="\n") as file:
            for number, line in enumerate(file, 1):
                if line.endswith("\n"):
                    yield number, line
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"{path}, behind line {number}: it can't be read ({error})") from error


def corpus_fingerprint(samples: Iterable[Sample]) -> str:
    """Hex sha256 over the token ids of all samples, in their order."""
    digest = hashlib.sha256()
    for sample in samples:
        digest.update(f"{sample.prompt_ids} {sample.answer_ids}\n".encode())
    return digest.hexdigest()


def drop_torn_line(path: Path) -> int:
    """Cut off what stands behind the last line's end, so that the next line starts on its own.
    Returns the size that is left."""
    content = path.read_bytes()
    size = content.rfind(b"\n") + 1
    if size < len(content):
        with path.open("r+b") as file:
            file.truncate(size)
    return size


def _identity(path: Path, line: str) -> dict[str, Any]:
    try:
        identity = json.loads(line)
    except json.JSONDecodeError as error:
        raise InvalidRequest(
            f"{path}, line 1: not JSON ({error}); the first line of a corpus is its manifest"
        ) from error
    if not isinstance(identity, dict) or not isinstance(identity.get("tokenizer"), str):
        raise InvalidRequest(
            f"{path}, line 1: not a corpus manifest; make a corpus with `d3d data`"
        )
    return identity


def _sample(path: Path, number: int, line: str) -> Sample:
    try:
        return SAMPLE.validate_json(line)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise InvalidRequest(
            f"{path}, line {number}: {where + ': ' if where else ''}{first['msg']}"
        ) from error
