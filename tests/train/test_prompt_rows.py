"""Rows out of JSON files, parquet files, directories and data sets of the hub."""

from __future__ import annotations

import gzip
import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from d3d.errors import InvalidRequest, MissingExtra
from d3d.train.prompt_rows import read_conversation, read_rows

SYSTEM = {"role": "system", "content": "Be kind."}
ROWS = [{"prompt": "a\u2028b"}, {"prompt": "c"}]
LINES = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS)


def test_json_lines_with_their_numbers(tmp_path: Path) -> None:
    file = tmp_path / "set.jsonl"
    file.write_text(f"\n{LINES}", encoding="utf-8")
    found = read_rows(str(file))
    assert found.rows == [(f"{file}, line 2", ROWS[0]), (f"{file}, line 3", ROWS[1])]
    assert (found.spec, found.name) == (str(file), "set")
    assert found.sha256 == hashlib.sha256(file.read_bytes()).hexdigest()


@pytest.mark.parametrize(
    ("name", "called"),
    [("set.jsonl.gz", "set"), ("my.set.jsonl", "my.set"), ("set", "set"), ("a.b.jsonl.gz", "a.b")],
)
def test_a_source_is_called_like_its_file(name: str, called: str, tmp_path: Path) -> None:
    content = LINES.encode()
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    found = read_rows(str(tmp_path / name))
    assert found.name == called
    assert [row for _, row in found.rows] == ROWS


def test_a_json_array_and_json_lines_in_a_json_file(tmp_path: Path) -> None:
    file = tmp_path / "set.json"
    file.write_text(json.dumps(ROWS, indent=1))
    assert read_rows(str(file)).rows == [
        (f"{file}, element 1", ROWS[0]),
        (f"{file}, element 2", ROWS[1]),
    ]
    file.write_text(LINES)
    assert [row for _, row in read_rows(str(file)).rows] == ROWS
    for content, words in (("[1]", "element 1: a JSON object is expected"), ("[{", "not JSON")):
        file.write_text(content)
        with pytest.raises(InvalidRequest, match=words):
            read_rows(str(file))


@pytest.mark.parametrize("content", [b"\xff\n", gzip.compress(b"{}", mtime=0)[:10], b"no gzip"])
def test_bytes_that_are_no_text_are_refused(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / ("a.jsonl" if content[0] == 0xFF else "a.jsonl.gz")
    file.write_bytes(content)
    with pytest.raises(InvalidRequest, match="can't be read"):
        read_rows(str(file))


@pytest.mark.parametrize(
    "spec",
    [
        "none.jsonl",
        "some/none.jsonl",
        "./org/name",
        "/org/name",
        "name",
        "a/b/c",
        "a/b:x:y:z",
        "a/b:",
    ],
)
def test_what_is_neither_a_file_nor_a_name_is_refused(
    spec: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidRequest, match="no such file"):
        read_rows(spec)


# With the library `datasets`


def test_without_the_library_the_install_line_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    (tmp_path / "a.parquet").write_bytes(b"")
    for spec in (str(tmp_path / "a.parquet"), str(tmp_path), "org/name"):
        with pytest.raises(MissingExtra, match=r"pip install 'd3d-decoding\[data\]'"):
            read_rows(spec)


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf")
    datasets.disable_progress_bars()
    return datasets.Dataset.from_list(
        [{"messages": [{"role": "user", "content": text}]} for text in ("a", "b")]
    )


def texts(spec: object) -> list[str]:
    return [row["messages"][0]["content"] for _, row in read_rows(str(spec)).rows]


def test_a_parquet_file(table: Any, tmp_path: Path) -> None:
    file = tmp_path / "chat.parquet"
    table.to_parquet(file)
    found = read_rows(str(file))
    assert found.rows[1] == (f"{file}, row 2", {"messages": [{"role": "user", "content": "b"}]})
    assert found.name == "chat"
    assert found.sha256 == read_rows(str(file)).sha256
    file.write_bytes(b"nonsense")
    with pytest.raises(InvalidRequest, match="can't be read as parquet"):
        read_rows(str(file))


def test_a_directory_of_parquet_files_and_one_that_the_library_saved(
    table: Any, tmp_path: Path
) -> None:
    (tmp_path / "files").mkdir()
    table.to_parquet(tmp_path / "files" / "train.parquet")
    assert texts(tmp_path / "files") == ["a", "b"]
    table.save_to_disk(tmp_path / "saved")
    assert texts(tmp_path / "saved") == ["a", "b"]
    import datasets

    splits = datasets.DatasetDict({"train": table, "other": table.select([1])})
    splits.save_to_disk(tmp_path / "splits")
    assert texts(tmp_path / "splits") == ["a", "b"]
    assert texts(f"{tmp_path / 'splits'}:other") == ["b"]
    with pytest.raises(InvalidRequest, match="the data set can't be read"):
        read_rows(f"{tmp_path / 'splits'}:none")


@pytest.mark.parametrize(
    ("spec", "asked"),
    [
        ("org/set", ("org/set", None, "train", None)),
        ("org/set:test", ("org/set", None, "test", None)),
        ("org/set:main:test", ("org/set", "main", "test", None)),
        ("org/set.v2:test[:10]", ("org/set.v2", None, "test[:10]", None)),
        ("org/set.v2@abc:main:test[10:20]", ("org/set.v2", "main", "test[10:20]", "abc")),
        ("org/set.v2@abc:main:test", ("org/set.v2", "main", "test", "abc")),
    ],
)
def test_a_name_of_the_hub_is_taken_apart(
    spec: str, asked: tuple[Any, ...], table: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def load_dataset(name: str, config: str | None, *, split: str, revision: str | None) -> Any:
        calls.append((name, config, split, revision))
        return table

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    found = read_rows(spec)
    assert calls == [asked]
    assert found.name == asked[0].split("/")[1]
    assert found.rows[0][0] == f"{spec}, row 1"


def test_a_data_set_that_cannot_be_had_is_one_line(
    table: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load_dataset(*_: Any, **__: Any) -> None:
        raise ConnectionError("no network\nand more")

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    with pytest.raises(
        InvalidRequest, match=r"org/set: the data set can't be read \(ConnectionError: no network\)"
    ):
        read_rows("org/set")


@pytest.mark.parametrize("name", ["set.jsonl", "set.json", "set.jsonl.gz"])
def test_a_byte_order_mark_is_no_part_of_the_text(name: str, tmp_path: Path) -> None:
    content = b"\xef\xbb\xbf" + (
        json.dumps(ROWS).encode() if name == "set.json" else LINES.replace("\n", "\r\n").encode()
    )
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    assert [row for _, row in read_rows(str(tmp_path / name)).rows] == ROWS


def test_utf_16_is_refused_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "set.jsonl").write_bytes(LINES.encode("utf-16"))
    with pytest.raises(InvalidRequest, match="save it as UTF-8"):
        read_rows(str(tmp_path / "set.jsonl"))


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


@pytest.mark.parametrize(
    ("row", "messages", "not_read"),
    [
        ({"instruction": "Translate.", "input": " the cat\n"}, [user("Translate.\n\nthe cat")], ()),
        ({"instruction": "Sum up.", "context": "A text.", "response": "x"}, None, ()),
        (
            {"question": "Who?", "context": "A text.", "input": "B"},
            [user("Who?\n\nB\n\nA text.")],
            (),
        ),
        ({"prompt": "Hi.", "system": "Be kind."}, [SYSTEM, user("Hi.")], ()),
        ({"question": "Hi.", "system_prompt": "Be kind."}, [SYSTEM, user("Hi.")], ()),
        (
            {"conversations": [{"from": "human", "value": "a"}], "system": "Be kind."},
            [SYSTEM, user("a")],
            (),
        ),
        ({"messages": [SYSTEM, user("a")], "system": "other"}, [SYSTEM, user("a")], ("system",)),
        ({"messages": [user("a")], "prompt": "b", "input": "c"}, [user("a")], ("prompt", "input")),
        (
            {"prompt": "a", "question": "b", "history": [["c", "d"]]},
            [user("a")],
            ("question", "history"),
        ),
        ({"prompt": "a", "context": {"x": ["y"]}, "input": "", "n": 3}, [user("a")], ("context",)),
        ({"prompt": "a", "id": "1", "answer": "b", "output": "c"}, [user("a")], ()),
    ],
    ids=str,
)
def test_fields_join_the_prompt_or_are_told(
    row: dict[str, Any], messages: list[dict[str, str]] | None, not_read: tuple[str, ...]
) -> None:
    found = read_conversation(row)
    assert found.messages == (messages or [user("Sum up.\n\nA text.")])
    assert found.not_read == not_read


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "x \ud800"},
        {"turns": ["a", "\udfff"]},
        {"prompt": "a", "system": "\ud800"},
        {"messages": [{"role": "user\ud800", "content": "b"}, user("a")]},
    ],
    ids=ascii,
)
def test_half_a_surrogate_pair_is_no_text(row: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match="not valid Unicode"):
        read_conversation(row)
