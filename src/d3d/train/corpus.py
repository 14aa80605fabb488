"""The training corpus: texts written by the target itself, one JSON object a line.

A row: {"prompt_ids": [...], "answer_ids": [...], "source": "...", "temperature": 0.0, "seed": 0};
also `top` if the target's best logits are stored beside it (`d3d.train.top_logits`), and `replaces`
if it takes the place of an earlier answer to this prompt, which was cut. The first line of a file
names its writer; a model with another tokenizer is refused. A corpus is one such file, or a
directory of them (answers-00000.jsonl, ...). A torn last line is not read, and is cut off when the
corpus is continued."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import Field, TypeAdapter, ValidationError

from d3d.errors import InvalidCheckpoint, InvalidRequest, first_problem
from d3d.files import FileKind, Journal
from d3d.inputs import parse_json, refuse_packed
from d3d.train.top_logits import TopLogits, TopReference, read_top_logits

TokenIds = list[Annotated[int, Field(strict=True, ge=0)]]

CORPUS = FileKind("a corpus", ("target", "tokenizer"))
SHARDS = "answers-*.jsonl"


class Sample(NamedTuple):
    """A prompt and the target's answer to it, as token ids."""

    prompt_ids: TokenIds
    answer_ids: TokenIds
    source: str
    temperature: float
    seed: int
    top: TopReference | None = None
    """Location of the target's best logits."""
    replaces: bool | None = None
    """True if it takes the place of an earlier answer to the same prompt, which was cut."""

    @property
    def token_ids(self) -> list[int]:
        return self.prompt_ids + self.answer_ids

    def top_logits(self) -> TopLogits | None:
        """The target's best logits at each answer token; None if the corpus has none. Raises
        InvalidCheckpoint."""
        return None if self.top is None else read_top_logits(self.top, len(self.answer_ids))


SAMPLE = TypeAdapter(Sample)


def read_corpus(
    path: Path, tokenizer_fingerprint: str | None = None, vocab_size: int | None = None
) -> list[Sample]:
    """All samples, in the order in which they were written, without those that a later one
    replaces. Raises InvalidRequest for a missing or malformed corpus, InvalidCheckpoint if it was
    written with another tokenizer.

    vocab_size: of the model that reads the token ids; None: any id is accepted."""
    samples = [
        sample
        for file in corpus_files(path)
        for sample in _samples(file, tokenizer_fingerprint, vocab_size)
    ]
    last = {
        answer_key(sample.prompt_ids, sample.temperature): number
        for number, sample in enumerate(samples)
        if sample.replaces
    }
    return [
        sample
        for number, sample in enumerate(samples)
        if not last or last.get(answer_key(sample.prompt_ids, sample.temperature), number) <= number
    ]


def corpus_files(path: Path) -> list[Path]:
    """Files of a corpus: `path` itself, or those in it. Raises InvalidRequest if there are none."""
    refuse_packed(path)
    files = sorted(path.glob(SHARDS)) if path.is_dir() else [path] if path.is_file() else []
    if not files:
        raise InvalidRequest(f"{path}: no such corpus; make one with `d3d data`")
    return files


def corpus_identity(file: Path) -> dict[str, Any]:
    """Writer of a corpus file, from its first line. Raises InvalidRequest if that is not one."""
    number, line = next(Journal(file, CORPUS).lines(), (1, ""))
    advice = "the first line of a corpus is its manifest"
    identity = parse_json(line, f"{file}, line {number}", advice)
    if not isinstance(identity, dict) or not isinstance(identity.get("tokenizer"), str):
        raise InvalidRequest(
            f"{file}, line {number}: not a corpus manifest; make a corpus with `d3d data`"
        )
    return identity


def corpus_fingerprint(samples: Iterable[Sample]) -> str:
    """Hex sha256 over the token ids of all samples, in their order."""
    digest = hashlib.sha256()
    for sample in samples:
        digest.update(f"{sample.prompt_ids} {sample.answer_ids}\n".encode())
    return digest.hexdigest()


def answer_key(prompt_ids: Sequence[int], temperature: float) -> bytes:
    """Key of an answer: a corpus holds one for each prompt and temperature."""
    return hashlib.blake2b(f"{temperature!r} {list(prompt_ids)}".encode(), digest_size=16).digest()


def lines_of(path: Path, samples: Iterable[Sample]) -> list[str]:
    """Files and lines of a corpus that hold these samples, for messages."""
    wanted = {(*sample.prompt_ids, -1, *sample.answer_ids) for sample in samples}
    found = []
    for file in corpus_files(path):
        lines = Journal(file, CORPUS).lines()
        next(lines)  # the identity
        for number, line in lines:
            sample = SAMPLE.validate_json(line)
            if (*sample.prompt_ids, -1, *sample.answer_ids) in wanted:
                found.append(f"{file}, line {number}")
    return found


def _samples(
    file: Path, tokenizer_fingerprint: str | None, vocab_size: int | None
) -> Iterator[Sample]:
    written_with = corpus_identity(file)["tokenizer"]
    if tokenizer_fingerprint not in (None, written_with):
        raise InvalidCheckpoint(
            f"{file} was written with another tokenizer (fingerprint {written_with[:12]}, the "
            f"model has {str(tokenizer_fingerprint)[:12]}); write one with this model"
        )
    lines = Journal(file, CORPUS).lines()
    next(lines)  # the identity
    for number, line in lines:
        try:
            sample = SAMPLE.validate_json(line)
        except ValidationError as error:
            raise InvalidRequest(f"{file}, line {number}: {first_problem(error)}") from error
        largest = max(sample.token_ids, default=0)
        if vocab_size is not None and largest >= vocab_size:
            raise InvalidRequest(
                f"{file}, line {number}: token id {largest}, but the model has embeddings for ids "
                f"below {vocab_size}; write the corpus again"
            )
        yield sample if sample.top is None else sample._replace(top=sample.top.beside(file))
