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

from d3d.engine.request import Request
from d3d.engine.sampling import LogitRows, Parents, Verdict, sample_match
from d3d.errors import InvalidCheckpoint
from d3d.files import CONTINUED, explained


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
    """Store the rows of several answers as the next part, atomically; returns their locations.
    Raises CantWrite."""
    directory = parts_directory(corpus_file)
    with explained(directory, CONTINUED):
        return _write_part(directory, answers)


def _write_part(directory: Path, answers: Sequence[TopLogits]) -> list[TopReference]:
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


class TopLogitsRecorder:
    """An acceptance rule for plain decoding that keeps the k best logits of every answer token."""

    def __init__(self, k: int) -> None:
        self._k = k
        self._rows: dict[int, list[TopLogits]] = {}

    def __call__(
        self,
        rows: LogitRows,
        draft_tokens: Sequence[int],
        request: Request,
        parents: Parents = None,
    ) -> Verdict:
        # first: it raises for what is not finite
        verdict = sample_match(rows, draft_tokens, request, parents)
        last = rows.logits()[-1:]
        best = last.topk(min(self._k, last.shape[-1]))
        log_probs = (best.values - last.logsumexp(-1, keepdim=True)).clamp(min=-65504).half()
        self._rows.setdefault(request.id, []).append(TopLogits(best.indices.int(), log_probs))
        return verdict

    def recorded(self, request: Request) -> TopLogits:
        """One row per answer token of a request that has ended."""
        return TopLogits(*(tensor.cpu() for tensor in _joined(self._rows.pop(request.id))))
