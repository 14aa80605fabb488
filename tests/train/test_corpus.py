"""The corpus file: strict about what it reads, and whole again after a killed writer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from d3d.errors import InvalidCheckpoint, InvalidRequest
from d3d.hub.fingerprint import tokenizer_fingerprint
from d3d.hub.open_model import OpenModel
from d3d.train.corpus import Sample, answer_key, read_corpus
from d3d.train.corpus_writer import (
    CorpusWriter,
    refuse_evaluation_corpus,
    writer_identity,
)
from d3d.train.top_logits import TopLogits, write_part
from support.tiny_model import open_tiny

SAMPLES = [Sample([1, 2], [3, 4, 5], "gsm8k", 0.0, 7), Sample([6], [7, 8], "chat", 0.8, 2**52)]


@pytest.fixture(scope="module")
def base(tiny_target: Path) -> OpenModel:
    return open_tiny(tiny_target)


def identity(base: OpenModel, **changes: Any) -> dict[str, Any]:
    return writer_identity(
        base, **{"thinking": None, "top_logits": 0, "evaluation_prompts": False, **changes}
    )


def write(
    path: Path,
    base: OpenModel,
    samples: list[Sample],
    shard_answers: int | None = None,
    **changes: Any,
) -> CorpusWriter:
    writer = CorpusWriter(path, identity(base, **changes), shard_answers)
    writer.start()
    writer.append(samples)
    writer.write_manifest({"run": "of a test"})
    return writer


@pytest.fixture
def corpus(base: OpenModel, tmp_path: Path) -> Path:
    path = tmp_path / "new" / "corpus.jsonl"
    write(path, base, SAMPLES)
    return path


def test_what_is_written_is_read(corpus: Path, base: OpenModel) -> None:
    assert read_corpus(corpus, tokenizer_fingerprint(base.tokenizer)) == SAMPLES
    first = json.loads(corpus.read_text().splitlines()[0])
    assert first == identity(base)
    assert first | {"template": None} == {
        "target": base.source,
        "target_fingerprint": base.fingerprint,
        "tokenizer": tokenizer_fingerprint(base.tokenizer),
        "template": None,
        "thinking": None,
        "top_logits": 0,
        "dtype": "float32",
        "evaluation_prompts": False,
    }


def test_opening_it_again_tells_what_it_holds(corpus: Path, base: OpenModel) -> None:
    known = CorpusWriter(corpus, identity(base)).known
    assert known == {answer_key([1, 2], 0.0): [3, 4, 5], answer_key([6], 0.8): [7, 8]}
    assert answer_key([1, 2], 0.8) not in known


def test_another_tokenizer_is_refused(corpus: Path) -> None:
    with pytest.raises(InvalidCheckpoint, match="was written with another tokenizer"):
        read_corpus(corpus, "0" * 64)


def test_a_torn_last_line_is_not_read_and_goes_when_the_corpus_is_continued(
    corpus: Path, base: OpenModel
) -> None:
    with corpus.open("a") as file:
        file.write('{"prompt_ids": [1, 2')
    assert read_corpus(corpus) == SAMPLES
    write(corpus, base, SAMPLES[:1])
    assert read_corpus(corpus) == [*SAMPLES, SAMPLES[0]]


@pytest.mark.parametrize("left", ["", '{"target": "x", "tok'])
def test_a_writer_killed_before_the_first_line_leaves_no_trace(
    left: str, base: OpenModel, tmp_path: Path
) -> None:
    path = tmp_path / "corpus.jsonl"
    path.write_text(left)
    assert write(path, base, SAMPLES).known == {}
    assert read_corpus(path) == SAMPLES


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("nonsense", "Invalid JSON"),
        ("[1, 2]", "should be a valid"),
        (
            '{"prompt_ids": [1], "source": "x", "temperature": 0, "seed": 0}',
            "answer_ids: Field required",
        ),
        (
            '{"prompt_ids": [1], "answer_ids": null, "source": "x", "temperature": 0, "seed": 0}',
            "answer_ids: Input should be a valid",
        ),
        (
            '{"prompt_ids": ["1"], "answer_ids": [2], "source": "x", "temperature": 0, "seed": 0}',
            "prompt_ids.0: '1' should be a valid integer",
        ),
        (
            '{"prompt_ids": [-1], "answer_ids": [2], "source": "x", "temperature": 0, "seed": 0}',
            "prompt_ids.0",
        ),
        (
            '{"prompt_ids": [1], "answer_ids": [2], "source": null, "temperature": 0, "seed": 0}',
            "source",
        ),
        (
            '{"prompt_ids": [1], "answer_ids": [2], "source": "x", "temperature": 0, "seed": 0, '
            '"text": ""}',
            "text",
        ),
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
    with pytest.raises(InvalidRequest, match=r"line 1: (it is not JSON|not a corpus manifest)"):
        read_corpus(path)


def test_what_is_no_corpus_is_not_continued_either(base: OpenModel, tmp_path: Path) -> None:
    path = tmp_path / "notes.jsonl"
    path.write_text('{"question": "a"}\n')
    with pytest.raises(InvalidRequest, match="is not a corpus written by d3d"):
        CorpusWriter(path, identity(base))
    assert path.read_text() == '{"question": "a"}\n'


def test_a_missing_corpus_and_bytes_that_are_no_text(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="make one with `d3d data`"):
        read_corpus(tmp_path / "none.jsonl")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\n")
    with pytest.raises(InvalidRequest, match="can't be read"):
        read_corpus(tmp_path / "bytes")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"thinking": True}, "another --thinking switch .None, now it is True"),
        ({"top_logits": 4}, "another --top-logits .0, now it is 4"),
    ],
)
def test_answers_that_were_written_otherwise_are_not_mixed(
    changes: dict[str, Any], words: str, corpus: Path, base: OpenModel
) -> None:
    before = corpus.read_text()
    with pytest.raises(InvalidCheckpoint, match=words):
        CorpusWriter(corpus, identity(base, **changes))
    assert corpus.read_text() == before


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("tokenizer", "another tokenizer"),
        ("target_fingerprint", "other weights"),
        ("template", "another chat template"),
    ],
)
def test_another_model_is_refused_by_what_differs(
    name: str, words: str, corpus: Path, base: OpenModel
) -> None:
    with pytest.raises(InvalidCheckpoint, match=words):
        CorpusWriter(corpus, identity(base) | {name: "0" * 64})


def test_an_older_corpus_that_says_less_is_gone_on_with(base: OpenModel, tmp_path: Path) -> None:
    path = tmp_path / "old.jsonl"
    first = {name: identity(base)[name] for name in ("target", "target_fingerprint", "tokenizer")}
    path.write_text(
        json.dumps(first)
        + "\n"
        + json.dumps({name: value for name, value in SAMPLES[0]._asdict().items() if name != "top"})
        + "\n"
    )
    write(path, base, SAMPLES[1:])
    assert read_corpus(path) == SAMPLES
    assert manifest(path)["answers"] == 2


def manifest(path: Path) -> dict[str, Any]:
    file = (
        path / "manifest.json"
        if path.is_dir()
        else path.with_name("old.manifest.json" if path.stem == "old" else "corpus.manifest.json")
    )
    content: dict[str, Any] = json.loads(file.read_text())
    return content


def test_the_manifest_counts_and_keeps_what_earlier_runs_told(
    corpus: Path, base: OpenModel
) -> None:
    write(corpus, base, SAMPLES[:1])
    assert manifest(corpus) == {
        "identity": identity(base),
        "answers": 3,
        "answer_tokens": 8,
        "cut": 0,
        "sources": {"chat": 1, "gsm8k": 2},
        "temperatures": {"0": 2, "0.8": 1},
        "shard_answers": None,
        "runs": [{"run": "of a test"}, {"run": "of a test"}],
    }
    corpus.with_name("corpus.manifest.json").write_text('{\n "identity": {"tar')
    write(corpus, base, [])
    assert manifest(corpus)["answers"] == 3


# Shards

MANY = [Sample([number], [number + 1, 2], "test", 0.0, number) for number in range(7)]


def test_a_directory_of_shards_is_read_like_one_file(base: OpenModel, tmp_path: Path) -> None:
    path = tmp_path / "corpus"
    writer = CorpusWriter(path, identity(base), 3)
    for start in range(0, 7, 2):  # batches that do not fit the shards
        writer.append(MANY[start : start + 2])
    assert read_corpus(path) == MANY
    assert [len(read_corpus(file)) for file in sorted(path.glob("*.jsonl"))] == [3, 3, 1]
    with pytest.raises(InvalidCheckpoint, match="another tokenizer"):
        read_corpus(path, "0" * 64)


def test_a_directory_is_gone_on_with_at_its_own_shard_size(base: OpenModel, tmp_path: Path) -> None:
    path = tmp_path / "corpus"
    write(path, base, MANY[:5], 2)
    last = sorted(path.glob("*.jsonl"))[-1]
    with last.open("a") as file:
        file.write('{"prompt_ids": [')  # killed
    assert len(write(path, base, MANY[5:]).known) == 5
    assert read_corpus(path) == MANY
    assert [len(read_corpus(file)) for file in sorted(path.glob("*.jsonl"))] == [2, 2, 2, 1]
    assert manifest(path)["shard_answers"] == 2
    assert manifest(path)["answers"] == 7


def test_one_form_of_a_corpus_is_not_taken_for_the_other(
    corpus: Path, base: OpenModel, tmp_path: Path
) -> None:
    with pytest.raises(InvalidRequest, match="leave --shard-answers out"):
        CorpusWriter(corpus, identity(base), 5)
    with pytest.raises(InvalidRequest, match="a directory without a corpus manifest"):
        CorpusWriter(tmp_path, identity(base))
    with pytest.raises(InvalidRequest, match="no such corpus"):
        read_corpus(tmp_path)


# Evaluation sets


def test_a_corpus_of_evaluation_prompts_is_not_trained_on_nor_made_of_another(
    corpus: Path, base: OpenModel, tmp_path: Path
) -> None:
    refuse_evaluation_corpus(corpus)
    with pytest.raises(InvalidRequest, match="a corpus to train on"):
        CorpusWriter(corpus, identity(base, evaluation_prompts=True))
    path = tmp_path / "evaluation.jsonl"
    write(path, base, SAMPLES[:1], evaluation_prompts=True)
    write(path, base, SAMPLES[1:])  # adding others to it does not make it one to train on
    with pytest.raises(InvalidRequest, match="problems of evaluation sets"):
        refuse_evaluation_corpus(path)


# Logits


def top(tokens: int, seed: int) -> TopLogits:
    generator = torch.Generator().manual_seed(seed)
    return TopLogits(
        torch.randint(0, 90, (tokens, 4), generator=generator).int(),
        torch.randn(tokens, 4, generator=generator).half(),
    )


@pytest.mark.parametrize("shard_answers", [None, 2])
def test_logits_come_back_with_their_answers(
    shard_answers: int | None, base: OpenModel, tmp_path: Path
) -> None:
    path = tmp_path / "corpus"
    samples = [Sample([number], list(range(number + 1)), "test", 0.0, 0) for number in range(6)]
    logits = [top(number + 1, number) for number in range(6)]
    for start, end in ((0, 3), (3, 6)):  # the second in another run
        CorpusWriter(path, identity(base, top_logits=4), shard_answers).append(
            samples[start:end], logits[start:end]
        )
        if shard_answers:
            CorpusWriter(path, identity(base, top_logits=4), shard_answers).write_manifest({})
    for sample, (ids, log_probs) in zip(read_corpus(path), logits, strict=True):
        found = sample.top_logits()
        assert found is not None
        assert torch.equal(found.ids, ids)
        assert torch.equal(found.log_probs, log_probs)
    assert SAMPLES[0].top_logits() is None


def test_logits_that_are_gone_or_cut_short_are_named(base: OpenModel, tmp_path: Path) -> None:
    path = tmp_path / "corpus.jsonl"
    CorpusWriter(path, identity(base, top_logits=4)).append([SAMPLES[0]], [top(2, 0)])
    (sample,) = read_corpus(path)
    with pytest.raises(InvalidCheckpoint, match="too few rows"):
        sample.top_logits()
    (tmp_path / "corpus.jsonl.top" / "part-00000.safetensors").write_bytes(b"x" * 20)
    with pytest.raises(
        InvalidCheckpoint, match=r"part-00000\.safetensors: the target's logits can't be read"
    ):
        sample.top_logits()


def test_logits_that_a_killed_writer_left_without_answers_harm_nobody(
    base: OpenModel, tmp_path: Path
) -> None:
    path = tmp_path / "corpus.jsonl"
    CorpusWriter(path, identity(base, top_logits=4)).append([SAMPLES[0]], [top(3, 0)])
    write_part(path, [top(9, 1)])  # killed before the answers were written
    (tmp_path / "corpus.jsonl.top" / "part-00007.partial").write_bytes(b"half")
    CorpusWriter(path, identity(base, top_logits=4)).append([SAMPLES[1]], [top(2, 2)])
    found = [sample.top_logits() for sample in read_corpus(path)]
    for logits, expected in zip(found, (top(3, 0), top(2, 2)), strict=True):
        assert logits is not None
        assert torch.equal(logits.ids, expected.ids)


def test_a_byte_order_mark_before_a_corpus_is_no_part_of_it(corpus: Path, base: OpenModel) -> None:
    fingerprint = tokenizer_fingerprint(base.tokenizer)
    before = read_corpus(corpus, fingerprint)
    corpus.write_bytes(b"\xef\xbb\xbf" + corpus.read_bytes())
    assert read_corpus(corpus, fingerprint) == before
