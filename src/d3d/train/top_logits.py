"""The target's best logits at each answer token, for distillation: recorded while it answers, and
stored beside the corpus.

`<corpus>.top/part-00000.safetensors` holds, for several answers in a row, `ids` int32 [tokens, k]
and `log_probs` float16 [tokens, k]: logits minus their logsumexp over the whole vocabulary, at
temperature 1, best first. Their softmax is the target's distribution over the k best tokens; one
minus the sum of their exponentials is the probability of all others."""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from d3d.core.protocols import TargetEngine, TargetSession
from d3d.errors import InvalidCheckpoint


class TopLogits(NamedTuple):
    """Row i comes from the distribution from which answer token i was chosen."""

    ids: Tensor
    """int32 [tokens, k], most likely first."""
    log_probs: Tensor
    """float16 [tokens, k]."""


class TopReference(NamedTuple):
    """Location of an answer's rows: a part file, and the first row in it."""

    part: str
    start: int

    def beside(self, corpus_file: Path) -> TopReference:
        """The same reference with the part's whole path."""
        return self._replace(part=str(parts_directory(corpus_file) / self.part))


def parts_directory(corpus_file: Path) -> Path:
    return corpus_file.with_name(corpus_file.name + ".top")


def write_part(corpus_file: Path, answers: Sequence[TopLogits]) -> list[TopReference]:
    """Store the rows of several answers as the next part, atomically; returns their locations."""
    directory = parts_directory(corpus_file)
    directory.mkdir(exist_ok=True)
    numbers = [int(part.stem.split("-")[1]) for part in directory.glob("part-*.safetensors")]
    file = directory / f"part-{max(numbers, default=-1) + 1:05d}.safetensors"
    partial = file.with_suffix(".partial")
    save_file(_joined(answers)._asdict(), partial)
    os.replace(partial, file)
    starts = accumulate((len(answer.ids) for answer in answers), initial=0)
    return [TopReference(file.name, start) for start, _ in zip(starts, answers, strict=False)]


def _joined(parts: Sequence[TopLogits]) -> TopLogits:
    return TopLogits(*(torch.cat(tensors) for tensors in zip(*parts, strict=True)))


def read_top_logits(reference: TopReference, num_tokens: int) -> TopLogits:
    """The rows of an answer of `num_tokens`. Raises InvalidCheckpoint if the part is missing,
    damaged or too short."""
    try:
        with safe_open(reference.part, framework="pt") as part:
            rows = slice(reference.start, reference.start + num_tokens)
            top = TopLogits(part.get_slice("ids")[rows], part.get_slice("log_probs")[rows])
    except (SafetensorError, OSError) as error:
        raise InvalidCheckpoint(
            f"{reference.part}: the target's logits can't be read ({error}); write the corpus again"
        ) from error
    if len(top.ids) != num_tokens:
        raise InvalidCheckpoint(f"{reference.part} holds too few rows; write the corpus again")
    return top


class RecordingEngine:
    """Wraps a target engine and keeps the k best logits of every row; for plain decoding."""

    def __init__(self, engine: TargetEngine, k: int) -> None:
        self._engine, self._k = engine, k
        self._rows: list[list[TopLogits]] = []

    @property
    def vocab_size(self) -> int:
        return self._engine.vocab_size

    @property
    def max_length(self) -> int:
        return self._engine.max_length

    def open(self, num_sequences: int, capacity: int) -> TargetSession:
        """Start recording anew."""
        self._rows = [[] for _ in range(num_sequences)]
        return _RecordingSession(self._engine.open(num_sequences, capacity), self._k, self._rows)

    def recorded(self) -> list[TopLogits]:
        """One row per answer token, for each sequence of the last session."""
        return [TopLogits(*(tensor.cpu() for tensor in _joined(rows))) for rows in self._rows]


class _RecordingSession:
    def __init__(self, session: TargetSession, k: int, rows: list[list[TopLogits]]) -> None:
        self._session, self._k, self._rows = session, k, rows

    @property
    def lengths(self) -> list[int]:
        return self._session.lengths

    def forward(self, token_ids: list[list[int]], *, last_only: bool = False) -> list[Tensor]:
        logits = self._session.forward(token_ids, last_only=last_only)
        last = torch.cat([rows[-1:] for rows in logits])
        best = last.topk(min(self._k, last.shape[-1]))
        log_probs = (best.values - last.logsumexp(-1, keepdim=True)).clamp(min=-65504).half()
        ids = best.indices.int()
        for row, kept in enumerate(self._rows):
            kept.append(TopLogits(ids[row : row + 1], log_probs[row : row + 1]))
        return logits

    def crop(self, lengths: list[int]) -> None:
        self._session.crop(lengths)

    def keep(self, rows: list[int]) -> None:
        self._session.keep(rows)
        self._rows = [self._rows[row] for row in rows]

    def join(self, count: int) -> None:
        raise ValueError(
            f"{count} sequences can't join: rows are recorded for those that the session was "
            "opened with"
        )
