"""Rows of prompt files, and the conversation that each row asks the model to continue.

Files hold JSON lines, or whatever the library `datasets` reads: parquet files, directories, data
sets of the hub. A line that is not a JSON object is an error that names its number."""

from __future__ import annotations

import gzip
import hashlib
import re
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from d3d.errors import InvalidRequest, MissingExtra
from d3d.inputs import input_path, parse_json
from d3d.json_text import to_json
from d3d.text.prompts import check_unicode
from d3d.train.evaluation_sets import without_formats, words

HUB_NAME = re.compile(
    r"(?P<name>\w[\w.-]*/\w[\w.-]*)(?:@(?P<revision>[^:]+))?"
    r"(?:(?::(?P<config>[^:\[]+))?:(?P<split>[^:\[]+(?:\[[^\]]*\])?))?"
)
FILE_SUFFIXES = (".jsonl", ".json", ".gz", ".parquet", ".csv", ".txt")
"""A name with one of these endings is meant to be a file."""

EXTRA = "pip install 'd3d-decoding[data]'"

TEXT_FIELDS = ("prompt", "question", "problem", "instruction", "text")
"""Fields that hold a user's turn, in the order of the search, after `messages`, `conversations` and
`turns`."""

JOINED_FIELDS = ("input", "context")
"""Fields that belong to such a turn, in the order in which they follow its text."""

SYSTEM_FIELDS = ("system", "system_prompt")
"""Fields that hold the system message of a row, unless its messages begin with one."""

NOT_ASKED = frozenset(
    ("id", "prompt_id", "question_id", "task_id", "unique_id")
    + ("answer", "answers", "chosen", "completion", "output", "outputs")
    + ("rejected", "response", "responses", "solution")
)
"""Fields that no prompt needs: answers, and names of rows."""

SHAREGPT_ROLES = {"human": "user", "gpt": "assistant"}

Message = dict[str, str]


@dataclass(frozen=True)
class PromptRows:
    """The rows of one prompt source."""

    spec: str
    name: str
    """`source` of the answers to its prompts."""
    sha256: str
    """Hash of the file's bytes, or of a data set's rows as JSON lines."""
    rows: list[tuple[str, dict[str, Any]]]
    """Location of each row (for messages), and the row."""


class Conversation(NamedTuple):
    """Messages that end with a user's turn, and the user's later turns, each to be asked once the
    turn before has been answered."""

    messages: list[Message]
    later: tuple[str, ...] = ()
    not_read: tuple[str, ...] = ()
    """Fields of its row that hold text and were not read."""

    @property
    def user_texts(self) -> list[str]:
        asked = [message["content"] for message in self.messages if message["role"] == "user"]
        return [*asked, *self.later]

    @property
    def key(self) -> tuple[str, ...]:
        """Identity of the conversation that ignores answer format, case, punctuation and white
        space."""
        turns = [(message["role"], message["content"]) for message in self.messages]
        turns += [("user", text) for text in self.later]
        return tuple(f"{role} {' '.join(words(without_formats(text)))}" for role, text in turns)


def read_rows(spec: str) -> PromptRows:
    """Read the rows of a prompt source.

    spec: a file of JSON lines (.gz too) or of one JSON array (.json); a .parquet file or a
    directory that `datasets` reads; or a data set of the hub, ORG/NAME[@REVISION][:CONFIG][:SPLIT].
    SPLIT may be a slice like `train[:1000]` and defaults to `train`; a directory takes one too.
    Raises InvalidRequest, with the line, for what is missing or malformed, or if there is no row,
    and MissingExtra if `datasets` is not installed."""
    source = _read_rows(spec)
    if not source.rows:
        raise InvalidRequest(f"{spec}: it holds no prompt")
    return source


def _read_rows(spec: str) -> PromptRows:
    path = input_path(spec)
    if path.is_file():
        return _parquet(spec, path) if path.suffix == ".parquet" else _json_file(spec, path)
    if path.is_dir() or input_path(spec.split(":")[0]).is_dir():
        directory, *split = [spec] if path.is_dir() else spec.split(":")
        return _data_set(spec, Path(directory).expanduser(), split=split[0] if split else None)
    hub = HUB_NAME.fullmatch(spec)
    if hub is None or path.suffix.lower() in FILE_SUFFIXES:
        raise InvalidRequest(
            f"{spec}: no such file, and not the name of a data set "
            "(ORG/NAME, ORG/NAME:SPLIT or ORG/NAME:CONFIG:SPLIT)"
        )
    return _data_set(spec, hub["name"], hub["config"], hub["revision"], split=hub["split"])


def _json_file(spec: str, path: Path) -> PromptRows:
    packed = path.suffix == ".gz"
    try:
        stored = path.read_bytes()
        text = (gzip.decompress(stored) if packed else stored).decode("utf-8-sig")
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise InvalidRequest(f"{path}: it can't be read ({error}); save it as UTF-8") from error
    rows = list(_json_rows(path, text))
    for where, row in rows:
        if not isinstance(row, dict):
            raise InvalidRequest(f"{where}: a JSON object is expected")
    name = (path.with_suffix("") if packed else path).stem
    return PromptRows(spec, name, hashlib.sha256(stored).hexdigest(), rows)


def _json_rows(path: Path, text: str) -> Iterator[tuple[str, Any]]:
    if ".json" in path.suffixes and text.lstrip().startswith("["):
        for number, row in enumerate(parse_json(text, str(path)), 1):
            yield f"{path}, element {number}", row
        return
    for number, line in enumerate(text.split("\n"), 1):  # texts may hold other line separators
        if line.strip():
            where = f"{path}, line {number}"
            yield where, parse_json(line, where)


def _parquet(spec: str, path: Path) -> PromptRows:
    datasets = _datasets()
    try:
        table = datasets.Dataset.from_parquet(str(path), keep_in_memory=True)
    except Exception as error:  # pyarrow and the library raise many kinds
        raise InvalidRequest(f"{path}: it can't be read as parquet ({_cause(error)})") from error
    return _of_table(spec, path.stem, table)


def _data_set(
    spec: str,
    source: str | Path,
    config: str | None = None,
    revision: str | None = None,
    *,
    split: str | None,
) -> PromptRows:
    datasets, split = _datasets(), split or "train"
    try:
        if isinstance(source, Path) and any(
            (source / name).is_file() for name in ("state.json", "dataset_dict.json")
        ):
            loaded = datasets.load_from_disk(str(source))
            table = loaded[split] if isinstance(loaded, dict) else loaded
        else:
            table = datasets.load_dataset(str(source), config, split=split, revision=revision)
    except Exception as error:  # no network, no such name, config or split: all of other kinds
        raise InvalidRequest(f"{spec}: the data set can't be read ({_cause(error)})") from error
    return _of_table(spec, Path(source).name, table)


def _of_table(spec: str, name: str, table: Any) -> PromptRows:
    digest = hashlib.sha256()
    rows = []
    for number, row in enumerate(table, 1):
        digest.update(to_json(row, sort_keys=True, default=str).encode() + b"\n")
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


def _cause(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


def read_conversation(row: Mapping[str, Any]) -> Conversation:
    """The conversation that a row asks the model to continue.

    `messages` (or ShareGPT's `conversations`) are cut after the last user's turn, since an answer
    may follow it. `turns` are the user's; the model answers each. A task's `input` and `context`
    join its text, and a `system` message goes before all. Raises InvalidRequest for a row without
    a conversation, or whose texts are not Unicode."""
    messages, later, read = _asked(row)
    system = next(filter(None, (_text(row, name) for name in SYSTEM_FIELDS)), "")
    if system and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": system}, *messages]
        read = (*read, *SYSTEM_FIELDS)
    for text in (*(text for each in messages for text in each.values()), *later):
        check_unicode(text, "prompt")
    known = {*read, *NOT_ASKED}
    left = (name for name in row if name not in known and _holds_text(row[name]))
    return Conversation(messages, later, tuple(left))


class _Asked(NamedTuple):
    messages: list[Message]
    later: tuple[str, ...]
    read: tuple[str, ...]
    """Fields that they were read from."""


def _asked(row: Mapping[str, Any]) -> _Asked:
    for name, role, content in (
        ("messages", "role", "content"),
        ("conversations", "from", "value"),
    ):
        if row.get(name):
            return _Asked(_up_to_user(row[name], name, role, content), (), (name,))
    if turns := row.get("turns"):
        if not isinstance(turns, list) or not all(
            isinstance(turn, str) and turn.strip() for turn in turns
        ):
            raise InvalidRequest("turns is no list of texts")
        first, *later = (turn.strip() for turn in turns)
        return _Asked([{"role": "user", "content": first}], tuple(later), ("turns",))
    for name in TEXT_FIELDS:
        if text := _text(row, name):
            joined = {other: _text(row, other) for other in JOINED_FIELDS}
            joined["instances"] = _task_input(row)
            used = [other for other in joined if joined[other]]
            content = "\n\n".join((text, *(joined[other] for other in used)))
            return _Asked([{"role": "user", "content": content}], (), (name, "instances", *used))
    raise InvalidRequest(f"no text in messages, conversations, turns, {', '.join(TEXT_FIELDS)}")


def _text(row: Mapping[str, Any], name: str) -> str:
    """A field's text, stripped; empty if it holds none."""
    value = row.get(name)
    return value.strip() if isinstance(value, str) else ""


def _holds_text(value: Any) -> bool:
    return (
        bool(value.strip())
        if isinstance(value, str)
        else isinstance(value, list | dict) and bool(value)
    )


def _up_to_user(messages: Any, name: str, role: str, content: str) -> list[Message]:
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise InvalidRequest(f"{name} is no list of messages")
    if any(
        not isinstance(message.get(part), str) for message in messages for part in (role, content)
    ):
        raise InvalidRequest(f"a message whose {role} or {content} is no text")
    asked = [
        {"role": SHAREGPT_ROLES.get(message[role], message[role]), "content": message[content]}
        for message in messages
    ]
    while asked and asked[-1]["role"] != "user":
        asked.pop()
    if not asked or not asked[-1]["content"].strip():
        raise InvalidRequest(f"{name} without a user's turn, or with an empty one at the end")
    return asked


def _task_input(row: Mapping[str, Any]) -> str:
    """Input of a self-instruct task, which its rows hold in a field of its own."""
    instances = row.get("instances")
    first = instances[0] if isinstance(instances, list) and instances else None
    return _text(first, "input") if isinstance(first, dict) else ""
