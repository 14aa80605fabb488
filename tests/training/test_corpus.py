"""The corpus file: strict about what it reads, and whole again after a killed writer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from d3d.core.errors import InvalidCheckpoint, InvalidRequest
from d3d.models.fingerprint import tokenizer_fingerprint
from d3d.models.open_model import OpenModel
from d3d.training.corpus import Sample, append_samples, open_corpus, read_corpus
from support.tiny_model import open_tiny

SAMPLES = [Sample([1, 2], [3, 4, 5], "gsm8k", 0.0, 7), Sample([6], [7, 8], "chat", 0.8, 2**52)]


@pytest.fixture(scope="module")
def base(tiny_target: Path) -> OpenModel:
    return open_tiny(tiny_target)


@pytest.fixture
def corpus(base: OpenModel, tmp_path: Path) -> Path:
    path = tmp_path / "new" / "corpus.jsonl"
    assert open_corpus(path, base) == set()
    append_samples(path, SAMPLES)
    return path


def test_what_is_written_is_read(corpus: Path, base: OpenModel) -> None:
    assert read_corpus(corpus, tokenizer_fingerprint(base.tokenizer)) == SAMPLES
    manifest = json.loads(corpus.read_text().splitlines()[0])
    assert manifest == {
        "target": base.source,
        "target_fingerprint": base.fingerprint,
        "tokenizer": tokenizer_fingerprint(base.tokenizer),
    }


def test_opening_it_again_tells_what_it_holds(corpus: Path, base: OpenModel) -> None:
    assert open_corpus(corpus, base) == {((1, 2), 0.0), ((6,), 0.8)}


def test_another_tokenizer_is_refused(corpus: Path) -> None:
    with pytest.raises(InvalidCheckpoint, match="was written with another tokenizer"):
        read_corpus(corpus, "0" * 64)


def test_a_torn_last_line_is_not_read_and_goes_when_the_corpus_is_continued(corpus: Path, base: OpenModel) -> None:
    with corpus.open("a") as file:
        file.write('{"prompt_ids": [1, 2')
    assert read_corpus(corpus) == SAMPLES
    open_corpus(corpus, base)
    append_samples(corpus, SAMPLES[:1])
    assert read_corpus(corpus) == [*SAMPLES, SAMPLES[0]]


@pytest.mark.parametrize("left", ["", '{"target": "x", "tok'])
def test_a_writer_killed_before_the_first_line_leaves_no_trace(left: str, base: OpenModel, tmp_path: Path) -> None:
    path = tmp_path / "corpus.jsonl"
    path.write_text(left)
    assert open_corpus(path, base) == set()
    append_samples(path, SAMPLES)
    assert read_corpus(path) == SAMPLES


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("nonsense", "Invalid JSON"),
        ("[1, 2]", "Input should be a valid"),
        ('{"prompt_ids": [1], "source": "x", "temperature": 0, "seed": 0}', "answer_ids: Field required"),
        ('{"prompt_ids": [1], "answer_ids": null, "source": "x", "temperature": 0, "seed": 0}', "answer_ids: Input should be a valid"),
        (
            '{"prompt_ids": ["1"], "answer_ids": [2], "source": "x", "temperature": 0, "seed": 0}',
            "prompt_ids.0: Input should be a valid integer",
        ),
        ('{"prompt_ids": [-1], "answer_ids": [2], "source": "x", "temperature": 0, "seed": 0}', "prompt_ids.0"),
        ('{"prompt_ids": [1], "answer_ids": [2], "source": null, "temperature": 0, "seed": 0}', "source"),
        ('{"prompt_ids": [1], "answer_ids": [2], "source": "x", "temperature": 0, "seed": 0, "text": ""}', "text"),
    ],
)
def test_a_malformed_line_is_named_by_its_number(line: str, message: str, corpus: Path) -> None:
    with corpus.open("a") as file:
        file.write(line + "\n")
    with pytest.raises(InvalidRequest) as caught:
        read_corpus(corpus)
    assert f"{corpus}, line 4: " in str(caught.value)
    assert message in str(caught.value)


@pytest.mark.parametrize("first", ["nonsense\n", "[]\n", '{"question": "a"}\n', ""])
def test_what_is_no_corpus_is_said_to_be_none(first: str, tmp_path: Path) -> None:
    path = tmp_path / "corpus.jsonl"
    path.write_text(first)
    with pytest.raises(InvalidRequest, match=r"line 1: not (JSON|a corpus manifest)"):
        read_corpus(path)


def test_what_is_no_corpus_is_not_continued_either(base: OpenModel, tmp_path: Path) -> None:
    path = tmp_path / "notes.jsonl"
    path.write_text('{"question": "a"}\n')
    with pytest.raises(InvalidRequest, match="not a corpus manifest"):
        open_corpus(path, base)
    assert path.read_text() == '{"question": "a"}\n'


def test_a_missing_corpus_and_bytes_that_are_no_text(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="make one with `d3d data`"):
        read_corpus(tmp_path / "none.jsonl")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\n")
    with pytest.raises(InvalidRequest, match="can't be read"):
        read_corpus(tmp_path / "bytes")
