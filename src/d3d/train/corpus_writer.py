"""Writing a corpus: one file, or shards in a directory, and a manifest beside the answers.

The first line of every file is the writer's identity; a corpus is gone on with only by the same
one. The manifest (corpus.manifest.json beside corpus.jsonl, or manifest.json in the directory)
counts answers and tells of each run what it read, left out and wrote. It is rewritten after every
batch; the answers are good without it."""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from d3d.errors import InvalidCheckpoint, InvalidRequest
from d3d.hub.fingerprint import tokenizer_fingerprint
from d3d.hub.open_model import OpenModel
from d3d.train.corpus import (
    SHARDS,
    Sample,
    corpus_files,
    corpus_identity,
    drop_torn_line,
    read_corpus,
)
from d3d.train.top_logits import TopLogits, write_part

MUST_AGREE = {
    "tokenizer": "another tokenizer",
    "target_fingerprint": "other weights",
    "template": "another chat template",
    "thinking": "another --thinking switch",
    "top_logits": "another --top-logits",
}
"""What all answers of a corpus have in common, and how a difference is called. What an older corpus
does not say is not compared."""


def writer_identity(
    model: OpenModel, *, thinking: bool | None, top_logits: int, evaluation_prompts: bool
) -> dict[str, Any]:
    """Who writes. `evaluation_prompts`: problems of evaluation sets are among the prompts, so
    nobody should train on it."""
    return {
        "target": model.source,
        "target_fingerprint": model.fingerprint,
        "tokenizer": tokenizer_fingerprint(model.tokenizer),
        "template": hashlib.sha256(str(model.tokenizer.chat_template).encode()).hexdigest(),
        "thinking": thinking,
        "top_logits": top_logits,
        "evaluation_prompts": evaluation_prompts,
    }


def refuse_evaluation_corpus(path: Path) -> None:
    """Raise InvalidRequest where a corpus holds answers to problems of evaluation sets, so that
    nobody trains on it unawares."""
    for file in corpus_files(path):
        if corpus_identity(file).get("evaluation_prompts"):
            raise InvalidRequest(
                f"{file} holds problems of evaluation sets (d3d data --allow-evaluation-prompts), so what is trained on it can't be "
                "measured with them; train on another corpus, or insist with --allow-evaluation-prompts"
            )


def answer_key(prompt_ids: Sequence[int], temperature: float) -> bytes:
    """Which answer of a corpus this is: it holds one for each prompt and temperature."""
    return hashlib.blake2b(f"{temperature!r} {list(prompt_ids)}".encode(), digest_size=16).digest()


class CorpusWriter:
    """Starts a corpus, or goes on with one."""

    def __init__(
        self, path: Path, identity: Mapping[str, Any], shard_answers: int | None = None
    ) -> None:
        """`shard_answers`: answers a file of a directory; None is one file, or what the directory
        was started with. Raises InvalidCheckpoint where another model wrote it, InvalidRequest
        where it is no corpus, or one of the other form."""
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
        files = sorted(path.glob(SHARDS)) if self._directory else [path] if path.exists() else []
        if files and not drop_torn_line(files[-1]):
            files.pop().unlink()
        for file in files:
            self._check(file)
        samples = read_corpus(path) if files else []
        self.known = {
            answer_key(sample.prompt_ids, sample.temperature): sample.answer_ids
            for sample in samples
        }
        """Answers that are there already, by `answer_key`."""
        manifest = _read_manifest(self.manifest_path)
        if shard_answers is None and self._directory:
            shard_answers = manifest.get("shard_answers")
            if not isinstance(shard_answers, int):
                raise InvalidRequest(
                    f"{path} is a directory without a corpus manifest; give --shard-answers, or a path of a new corpus"
                )
        self._shard_answers = shard_answers
        self._earlier_runs = manifest.get("runs", [])
        self._sources, self._temperatures = Counter[str](), Counter[str]()
        self.answers = self._tokens = 0
        for sample in samples:
            self._count(sample)
        self._files = len(files)
        self._file = files[-1] if files else None
        self._in_file = _num_lines(files[-1]) - 1 if files else 0

    def start(self) -> Path:
        """The file that the next answers go to, with its first line."""
        if self._file is None or (
            self._shard_answers is not None and self._in_file >= self._shard_answers
        ):
            self._file = (
                self.path / SHARDS.replace("*", f"{self._files:05d}")
                if self._directory
                else self.path
            )
            self._file.parent.mkdir(parents=True, exist_ok=True)
            _write_whole(self._file, json.dumps(self._identity) + "\n")
            self._files, self._in_file = self._files + 1, 0
        return self._file

    def append(
        self, samples: Sequence[Sample], top_logits: Sequence[TopLogits] | None = None
    ) -> None:
        """Write answers; `top_logits` holds each one's."""
        start = 0
        while start < len(samples):
            file = self.start()
            room = (
                len(samples) if self._shard_answers is None else self._shard_answers - self._in_file
            )
            part = samples[start : start + room]
            if (
                top_logits is not None
            ):  # before the answers that name them: a kill in between leaves a part that nobody reads
                references = write_part(file, top_logits[start : start + room])
                part = [
                    sample._replace(top=reference)
                    for sample, reference in zip(part, references, strict=True)
                ]
            with file.open("a", encoding="utf-8") as out:
                for sample in part:
                    out.write(
                        json.dumps(
                            {
                                name: value
                                for name, value in sample._asdict().items()
                                if value is not None
                            }
                        )
                        + "\n"
                    )
                    self._count(sample)
            start, self._in_file = start + len(part), self._in_file + len(part)

    def write_manifest(self, run: Mapping[str, Any]) -> None:
        """Tell about this run as it stands now."""
        manifest = {
            "identity": self._identity,
            "answers": self.answers,
            "answer_tokens": self._tokens,
            "sources": dict(sorted(self._sources.items())),
            "temperatures": dict(sorted(self._temperatures.items())),
            "shard_answers": self._shard_answers,
            "runs": [*self._earlier_runs, run],
        }
        _write_whole(self.manifest_path, json.dumps(manifest, indent=1) + "\n")

    def _count(self, sample: Sample) -> None:
        self.answers += 1
        self._tokens += len(sample.answer_ids)
        self._sources[sample.source] += 1
        self._temperatures[f"{sample.temperature:g}"] += 1

    def _check(self, file: Path) -> None:
        """Raises InvalidCheckpoint where what must agree does not."""
        found = corpus_identity(file)
        for name, difference in MUST_AGREE.items():
            if name in found and found[name] != self._identity[name]:
                raise InvalidCheckpoint(
                    f"{file} was written with {difference} ({_short(found[name])}, now it is {_short(self._identity[name])}); "
                    "a corpus is not mixed, so write another one"
                )
        if self._identity["evaluation_prompts"] and not found.get("evaluation_prompts"):
            raise InvalidRequest(
                f"{file} is a corpus to train on; write the answers to problems of evaluation sets to another one"
            )


def _read_manifest(path: Path) -> dict[str, Any]:
    """A manifest that is missing or damaged is made anew: it tells, it decides nothing about
    answers."""
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return manifest if isinstance(manifest, dict) else {}


def _write_whole(path: Path, text: str) -> None:
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)


def _num_lines(path: Path) -> int:
    with path.open("rb") as file:
        return sum(1 for _ in file)


def _short(value: object) -> str:
    return value[:12] if isinstance(value, str) else str(value)
