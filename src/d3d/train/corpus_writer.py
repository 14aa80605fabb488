"""Writing a corpus: one file, or shards in a directory, with a manifest beside the answers.

The first line of every file is the writer's identity; only the same writer may continue a corpus.
The manifest (corpus.manifest.json beside corpus.jsonl, or manifest.json in the directory) counts
answers and records what each run read, left out and wrote. It is rewritten after every batch; the
answers are usable without it."""

from __future__ import annotations

import hashlib
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from d3d.errors import InvalidCheckpoint, InvalidRequest
from d3d.files import CONTINUED, Alone, FileKind, Journal, alone_in, alone_with, write_whole
from d3d.hub.fingerprint import tokenizer_fingerprint
from d3d.hub.open_model import OpenModel
from d3d.inputs import read_object
from d3d.json_text import to_json
from d3d.train.corpus import (
    CORPUS,
    SHARDS,
    Sample,
    answer_key,
    corpus_files,
    corpus_identity,
    read_corpus,
)
from d3d.train.top_logits import TopLogits, write_part

MANIFEST = FileKind("the manifest of a corpus", ("identity", "answers", "runs"))
MUST_AGREE = {
    "tokenizer": "another tokenizer",
    "target_fingerprint": "other weights",
    "template": "another chat template",
    "thinking": "another --thinking switch",
    "top_logits": "another --top-logits",
    "dtype": "another --dtype",
}
"""Parts of the identity that all answers of a corpus share, and the words for a difference. Parts
that an older corpus lacks are not compared."""


def writer_identity(
    model: OpenModel, *, thinking: bool | None, top_logits: int, evaluation_prompts: bool
) -> dict[str, Any]:
    """Identity of the writer. evaluation_prompts: whether problems of evaluation sets are among the
    prompts, so that nobody should train on the corpus."""
    return {
        "target": model.source,
        "target_fingerprint": model.fingerprint,
        "tokenizer": tokenizer_fingerprint(model.tokenizer),
        "template": hashlib.sha256(str(model.tokenizer.chat_template).encode()).hexdigest(),
        "thinking": thinking,
        "top_logits": top_logits,
        "dtype": str(model.transformer.embedding.dtype).removeprefix("torch."),
        "evaluation_prompts": evaluation_prompts,
    }


def refuse_evaluation_corpus(path: Path) -> None:
    """Raise InvalidRequest if a corpus holds answers to problems of evaluation sets."""
    for file in corpus_files(path):
        if corpus_identity(file).get("evaluation_prompts"):
            raise InvalidRequest(
                f"{file} holds problems of evaluation sets (d3d data --allow-evaluation-prompts), "
                "so a drafter trained on it can't be measured with them; train on another corpus, "
                "or insist with --allow-evaluation-prompts"
            )


class AnswerEnds(NamedTuple):
    """What ends an answer."""

    eos_token_ids: frozenset[int]
    max_tokens: int
    context: int
    """Tokens of the longest text."""

    def is_cut(self, sample: Sample) -> bool:
        """True if the answer ended before its natural end."""
        return not self.eos_token_ids.intersection(sample.answer_ids[-1:])

    def would_go_on(self, sample: Sample) -> bool:
        """True if the answer was cut, and would now be longer."""
        limit = min(self.max_tokens, self.context - len(sample.prompt_ids))
        return self.is_cut(sample) and len(sample.answer_ids) < limit


def hold_corpus(path: Path, shard_answers: int | None) -> Alone:
    """Keeps other processes away from a corpus. Arguments as for `CorpusWriter`."""
    is_directory = path.is_dir() or (shard_answers is not None and not path.is_file())
    return (alone_in if is_directory else alone_with)(path, "d3d data")


class CorpusWriter:
    """Starts a corpus, or continues one. The caller holds it (`hold_corpus`)."""

    def __init__(
        self,
        path: Path,
        identity: Mapping[str, Any],
        shard_answers: int | None = None,
        ends: AnswerEnds | None = None,
    ) -> None:
        """shard_answers: answers per file of a directory; None writes one file, or continues a
        directory at its own size. ends: tells which answers were cut; None takes them as they are.
        Raises InvalidCheckpoint if another model wrote the corpus, InvalidRequest if `path` is not
        a corpus, or one of the other form; nothing has been changed then."""
        if path.is_file() and shard_answers is not None:
            raise InvalidRequest(
                f"{path} is a corpus in one file; leave --shard-answers out, or choose another path"
            )
        self.path, self._identity = path, dict(identity)
        self._directory = path.is_dir() or shard_answers is not None
        self.manifest_path = (
            path / "manifest.json"
            if self._directory
            else path.with_name(f"{path.stem}.manifest.json")
        )
        MANIFEST.check(self.manifest_path)
        files = sorted(path.glob(SHARDS)) if self._directory else [path] if path.exists() else []
        for file in files:
            CORPUS.check(file)
        if files and not Journal(files[-1], CORPUS).cut_torn_line():
            files.pop().unlink()
        for file in files:
            self._check(file)
        manifest = _read_manifest(self.manifest_path)
        if shard_answers is None and self._directory:
            shard_answers = manifest.get("shard_answers")
            if not isinstance(shard_answers, int):
                raise InvalidRequest(
                    f"{path} is a directory without a corpus manifest; give --shard-answers, or "
                    "a path of a new corpus"
                )
        self._shard_answers = shard_answers
        self._earlier_runs = manifest.get("runs", [])
        self._sources, self._temperatures = Counter[str](), Counter[str]()
        self.answers = self._tokens = self._in_file = self.cut = self.replaced = 0
        self.known: dict[bytes, list[int]] = {}
        """Answers that the corpus holds already, by `answer_key`, without those that are cut and
        would now be longer: they are to be written anew."""
        self._ends = ends
        self._unfinished: dict[bytes, Sample] = {}
        self._files = len(files)
        self._file = files[-1] if files else None
        for file in files:
            self._in_file = sum(1 for _ in Journal(file, CORPUS).lines()) - 1
        for sample in read_corpus(path) if files else []:
            self._count(sample)
            key = _key(sample)
            if ends is not None and ends.would_go_on(sample):
                self._unfinished[key] = sample
            else:
                self.known[key] = sample.answer_ids

    def start(self) -> Path:
        """File of the next answers; if it is new, its first line is written."""
        full = self._shard_answers is not None and self._in_file >= self._shard_answers
        if self._file is None or full:
            shard = self.path / SHARDS.replace("*", f"{self._files:05d}")
            self._file = shard if self._directory else self.path
            write_whole(self._file, CORPUS, to_json(self._identity) + "\n", CONTINUED)
            self._files, self._in_file = self._files + 1, 0
        return self._file

    def append(
        self, samples: Sequence[Sample], top_logits: Sequence[TopLogits] | None = None
    ) -> None:
        """Write answers; `top_logits` holds each one's."""
        start = 0
        while start < len(samples):
            file = self.start()
            room = None if self._shard_answers is None else self._shard_answers - self._in_file
            end = len(samples) if room is None else min(start + room, len(samples))
            part = [self._replacing(sample) for sample in samples[start:end]]
            if top_logits is not None:
                # before the answers: a kill in between leaves only a part that nobody reads
                references = write_part(file, top_logits[start:end])
                part = [
                    sample._replace(top=reference)
                    for sample, reference in zip(part, references, strict=True)
                ]
            Journal(file, CORPUS).append(*map(_row, part))
            for sample in part:
                if sample.replaces:
                    self.replaced += 1
                    self._count(self._unfinished.pop(_key(sample)), -1)
                self._count(sample)
            self._in_file += len(part)
            start = end

    def write_manifest(self, run: Mapping[str, Any]) -> None:
        """Write the manifest with the present state of this run."""
        manifest = {
            "identity": self._identity,
            "answers": self.answers,
            "answer_tokens": self._tokens,
            "cut": self.cut,
            "sources": dict(sorted(self._sources.items())),
            "temperatures": dict(sorted(self._temperatures.items())),
            "shard_answers": self._shard_answers,
            "runs": [*self._earlier_runs, run],
        }
        write_whole(self.manifest_path, MANIFEST, to_json(manifest, indent=1) + "\n", CONTINUED)

    def _replacing(self, sample: Sample) -> Sample:
        return sample._replace(replaces=True) if _key(sample) in self._unfinished else sample

    def _count(self, sample: Sample, times: int = 1) -> None:
        self.answers += times
        self._tokens += times * len(sample.answer_ids)
        self._sources[sample.source] += times
        self._temperatures[f"{sample.temperature:g}"] += times
        if self._ends is not None and self._ends.is_cut(sample):
            self.cut += times

    def _check(self, file: Path) -> None:
        written_by = corpus_identity(file)
        for name, difference in MUST_AGREE.items():
            if name in written_by and written_by[name] != self._identity[name]:
                raise InvalidCheckpoint(
                    f"{file} was written with {difference} ({_short(written_by[name])}, now it is "
                    f"{_short(self._identity[name])}); a corpus is not mixed, so write another one"
                )
        if self._identity["evaluation_prompts"] and not written_by.get("evaluation_prompts"):
            raise InvalidRequest(
                f"{file} is a corpus to train on; write the answers to problems of evaluation sets "
                "to another one"
            )


def _row(sample: Sample) -> str:
    return to_json({name: value for name, value in sample._asdict().items() if value is not None})


def _read_manifest(path: Path) -> dict[str, Any]:
    """A missing or torn manifest is started anew; no answer depends on it."""
    if not path.is_file():
        return {}
    try:
        return read_object(path)
    except InvalidRequest as error:
        print(f"d3d: {path} is torn and is started anew ({error})", file=sys.stderr)
        return {}


def _key(sample: Sample) -> bytes:
    return answer_key(sample.prompt_ids, sample.temperature)


def _short(value: object) -> str:
    return value[:12] if isinstance(value, str) else str(value)
