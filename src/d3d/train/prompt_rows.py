"""Rows of prompt files: JSON lines, or what the library `datasets` reads (parquet files,
directories, data sets of the hub).

A line that is no JSON object stops everything, by its number; what a row means is
`d3d.train.prompts`' business."""

from __future__ import annotations

import gzip
import hashlib
import json
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from d3d.errors import InvalidRequest, MissingExtra

HUB_NAME = re.compile(
    r"(?P<name>\w[\w.-]*/\w[\w.-]*)(?:@(?P<revision>[^:]+))?(?:(?::(?P<config>[^:\[]+))?:(?P<split>[^:\[]+(?:\[[^\]]*\])?))?"
)
FILE_SUFFIXES = (".jsonl", ".json", ".gz", ".parquet", ".csv", ".txt")
"""What ends in these was meant to be a file."""

EXTRA = "pip install 'd3d-decoding[data]'"


@dataclass(frozen=True)
class PromptRows:
    """Everything that one prompt source holds."""

    spec: str
    name: str
    """What the answers' `source` says."""
    sha256: str
    """Of the file's bytes; of a data set, of its rows as JSON lines."""
    rows: list[tuple[str, dict[str, Any]]]
    """Where each row stands (for people), and the row."""


def read_rows(spec: str) -> PromptRows:
    """The rows of a prompt source.

    `spec`: a file of JSON lines (.gz too) or with one JSON array (.json); a .parquet file or a
    directory that `datasets` reads; or a data set of the hub, ORG/NAME[@REVISION][:CONFIG][:SPLIT].
    SPLIT may be a slice like `train[:1000]`, and is `train` unless given; a directory takes it too.
    Raises InvalidRequest for what is missing or malformed, by its line, and MissingExtra where
    `datasets` is not installed."""
    path = Path(spec).expanduser()
    if path.is_file():
        return _parquet(spec, path) if path.suffix == ".parquet" else _json_file(spec, path)
    if path.is_dir() or Path(spec.split(":")[0]).expanduser().is_dir():
        directory, *split = [spec] if path.is_dir() else spec.split(":")
        return _dataset(spec, Path(directory).expanduser(), None, None, split)
    found = HUB_NAME.fullmatch(spec)
    if found and path.suffix.lower() not in FILE_SUFFIXES:
        return _dataset(
            spec,
            found["name"],
            found["config"],
            found["revision"],
            [found["split"]] if found["split"] else [],
        )
    raise InvalidRequest(
        f"{spec}: no such file, and not a data set's name (ORG/NAME, ORG/NAME:SPLIT or ORG/NAME:CONFIG:SPLIT)"
    )


def _json_file(spec: str, path: Path) -> PromptRows:
    try:
        stored = path.read_bytes()
        content = gzip.decompress(stored) if path.suffix == ".gz" else stored
        text = content.decode("utf-8")
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise InvalidRequest(f"{path}: it can't be read ({error}); save it as UTF-8") from error
    name = path.name.removesuffix(".gz").removesuffix(
        path.with_suffix("").suffix if path.suffix == ".gz" else path.suffix
    )
    is_array = ".json" in path.suffixes and text.lstrip().startswith("[")
    rows = _array(path, text) if is_array else _lines(path, text)
    return PromptRows(spec, name, hashlib.sha256(stored).hexdigest(), list(rows))


def _lines(path: Path, text: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Only a newline ends a line: text may hold other separators."""
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            yield f"{path}, line {number}", _object(line, f"{path}, line {number}")


def _object(line: str, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise InvalidRequest(f"{where}: not JSON ({error})") from error
    if not isinstance(row, dict):
        raise InvalidRequest(f"{where}: a JSON object is expected")
    return row


def _array(path: Path, text: str) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        array = json.loads(text)
    except json.JSONDecodeError as error:
        raise InvalidRequest(f"{path}: not JSON ({error})") from error
    for number, row in enumerate(array, 1):
        if not isinstance(row, dict):
            raise InvalidRequest(f"{path}, element {number}: a JSON object is expected")
        yield f"{path}, element {number}", row


def _parquet(spec: str, path: Path) -> PromptRows:
    datasets = _datasets()
    try:
        table = datasets.Dataset.from_parquet(str(path), keep_in_memory=True)
    except Exception as error:  # pyarrow's and the library's own, of many kinds
        raise InvalidRequest(
            f"{path}: it can't be read as parquet ({_first_line(error)})"
        ) from error
    return _of_table(spec, path.stem, table)


def _dataset(
    spec: str, where: str | Path, config: str | None, revision: str | None, split: list[str]
) -> PromptRows:
    datasets = _datasets()
    split_name = split[0] if split else "train"
    try:
        if isinstance(where, Path) and any(
            (where / name).is_file() for name in ("state.json", "dataset_dict.json")
        ):
            loaded = datasets.load_from_disk(str(where))
            table = loaded[split_name] if isinstance(loaded, dict) else loaded
        else:
            table = datasets.load_dataset(str(where), config, split=split_name, revision=revision)
    except (
        Exception
    ) as error:  # no network, no such name, config or split: each has an exception of its own
        raise InvalidRequest(
            f"{spec}: the data set can't be read ({_first_line(error)})"
        ) from error
    return _of_table(spec, Path(where).name, table)


def _of_table(spec: str, name: str, table: Any) -> PromptRows:
    digest = hashlib.sha256()
    rows = []
    for number, row in enumerate(table, 1):
        digest.update(json.dumps(row, sort_keys=True, default=str).encode() + b"\n")
        rows.append((f"{spec}, row {number}", dict(row)))
    return PromptRows(spec, name, digest.hexdigest(), rows)


def _datasets() -> Any:
    try:
        import datasets
    except ImportError as error:
        raise MissingExtra(
            f"parquet files, directories and data sets need the library `datasets`: {EXTRA}"
        ) from error
    return datasets


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
