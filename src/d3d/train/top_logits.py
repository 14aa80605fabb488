"""The target's best logits at each answer token, for distillation: recorded while it writes, stored
beside the corpus.

`<corpus>.top/part-00000.safetensors` holds, for some answers one after another, `ids` int32
[tokens, k] and `log_probs` float16 [tokens, k]: logits minus their logsumexp over the whole
vocabulary, at temperature 1, best first. So a softmax over them is what the target said about the k
best, and one minus the sum of their exponentials is what it gave to all others."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from d3d.core.protocols import TargetEngine, TargetSession
from d3d.errors import InvalidCheckpoint


class TopLogits(NamedTuple):
    """Row i belongs to the distribution from which answer token i was chosen."""

    ids: Tensor
    """int32 [tokens, k], most likely first."""
    log_probs: Tensor
    """float16 [tokens, k]."""


class TopReference(NamedTuple):
    """The rows of one answer: a part, and the first of its rows."""

    part: str
    start: int

    def beside(self, corpus_file: Path) -> TopReference:
        """With the whole path of the part."""
        return self._replace(part=str(parts_directory(corpus_file) / self.part))


def parts_directory(corpus_file: Path) -> Path:
    return corpus_file.with_name(corpus_file.name + ".top")


def write_part(corpus_file: Path, answers: Sequence[TopLogits]) -> list[TopReference]:
    """Store the rows of some answers as the next part, whole or not at all; where each of them
    lies."""
    directory = parts_directory(corpus_file)
    directory.mkdir(exist_ok=True)
    number = (
        max(
            (int(file.stem.split("-")[1]) for file in directory.glob("part-*.safetensors")),
            default=-1,
        )
        + 1
    )
    file = directory / f"part-{number:05d}.safetensors"
    partial = file.with_suffix(".partial")
    save_file(
        {
            "ids": torch.cat([one.ids for one in answers]),
            "log_probs": torch.cat([one.log_probs for one in answers]),
        },
        partial,
    )
    os.replace(partial, file)
    starts = [0]
    for one in answers:
        starts.append(starts[-1] + len(one.ids))
    return [TopReference(file.name, start) for start in starts[:-1]]


def read_top_logits(reference: TopReference, num_tokens: int) -> TopLogits:
    """Raises InvalidCheckpoint where the part is missing, damaged or too short."""
    try:
        with safe_open(reference.part, framework="pt") as part:
            rows = slice(reference.start, reference.start + num_tokens)
            found = TopLogits(part.get_slice("ids")[rows], part.get_slice("log_probs")[rows])
    except (SafetensorError, OSError) as error:
        raise InvalidCheckpoint(
            f"{reference.part}: the target's logits can't be read ({error}); write the corpus again"
        ) from error
    if len(found.ids) != num_tokens:
        raise InvalidCheckpoint(f"{reference.part} holds too few rows; write the corpus again")
    return found


class RecordingEngine:
    """A target engine that keeps the k best logits of every row which it is asked for; for plain
    decoding."""

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
        """Forgets what was recorded before."""
        self._rows = [[] for _ in range(num_sequences)]
        return _RecordingSession(self._engine.open(num_sequences, capacity), self._k, self._rows)

    def recorded(self) -> list[TopLogits]:
        """Of each sequence of the last session, a row for each of its answer tokens."""
        return [
            TopLogits(
                torch.cat([row.ids for row in rows]).cpu(),
                torch.cat([row.log_probs for row in rows]).cpu(),
            )
            for rows in self._rows
        ]


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
            f"{count} sequences can't join: what is recorded belongs to those that the session was opened with"
        )
