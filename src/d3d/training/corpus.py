"""The training corpus: texts that the target itself has written, one JSON object a line.

A row: {"prompt_ids": [...], "answer_ids": [...], "source": "...", "temperature": 0.0, "seed": 0}. The first line is the
manifest, which names the tokenizer; a corpus is refused for a model with another one.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from d3d.core.errors import InvalidCheckpoint, InvalidRequest
from d3d.models.fingerprint import tokenizer_fingerprint
from d3d.models.open_model import OpenModel


class Sample(NamedTuple):
    """One prompt and the target's answer to it, as token ids."""

    prompt_ids: list[int]
    answer_ids: list[int]
    source: str
    temperature: float
    seed: int

    @property
    def token_ids(self) -> list[int]:
        return self.prompt_ids + self.answer_ids


def read_corpus(path: Path, tokenizer_fingerprint: str | None = None) -> list[Sample]:
    """Raises InvalidRequest for a missing or malformed file, InvalidCheckpoint where the tokenizer is another one."""
    if not path.is_file():
        raise InvalidRequest(f"{path}: no such corpus; make one with `d3d data`")
    with path.open() as file:
        manifest = _parse(path, 1, file.readline())
        if "tokenizer" not in manifest:
            raise InvalidRequest(f"{path}: the first line is not a corpus manifest")
        if tokenizer_fingerprint not in (None, manifest["tokenizer"]):
            raise InvalidCheckpoint(
                f"{path} was written with another tokenizer ({manifest['tokenizer']}, the model has {tokenizer_fingerprint})"
            )
        return [_sample(path, number, line) for number, line in enumerate(file, 2) if line.endswith("\n")]


def open_corpus(path: Path, model: OpenModel) -> set[tuple[tuple[int, ...], float]]:
    """Start a corpus, or go on with one that the same tokenizer wrote: which (prompt ids, temperature) it holds already."""
    tokenizer = tokenizer_fingerprint(model.tokenizer)
    if path.exists():
        return {(tuple(sample.prompt_ids), sample.temperature) for sample in read_corpus(path, tokenizer)}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"target": model.source, "target_fingerprint": model.fingerprint, "tokenizer": tokenizer}) + "\n")
    return set()


def append_samples(path: Path, samples: Iterable[Sample]) -> None:
    with path.open("a") as file:
        for sample in samples:
            file.write(json.dumps(sample._asdict()) + "\n")


def _parse(path: Path, number: int, line: str) -> dict[str, object]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise InvalidRequest(f"{path}, line {number}: not JSON ({error})") from error
    if not isinstance(row, dict):
        raise InvalidRequest(f"{path}, line {number}: a JSON object is expected")
    return row


def _sample(path: Path, number: int, line: str) -> Sample:
    try:
        return Sample(**_parse(path, number, line))  # type: ignore[arg-type]
    except TypeError as error:
        raise InvalidRequest(f"{path}, line {number}: {error}") from error
