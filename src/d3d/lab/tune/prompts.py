"""What is tuned on: prompts of one's own, or recorded traffic."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from d3d.api import Model
from d3d.errors import InvalidRequest
from d3d.lab.tune.traffic import Record, ids_sha256, is_traffic, read_traffic
from d3d.train.prompts import LeftOut, read_prompts


class TuningPrompts(NamedTuple):
    """Prompts, and where they are from."""

    name: str
    token_ids: list[list[int]]
    notes: tuple[str, ...] = ()
    """What was left out, for people."""

    @property
    def sha256(self) -> str:
        """Of what is asked, in its order."""
        return hashlib.sha256(" ".join(map(ids_sha256, self.token_ids)).encode()).hexdigest()


def tuning_prompts(path: Path, model: Model, *, limit: int, seed: int) -> TuningPrompts:
    """At most `limit` different prompts of a file of rows, or of traffic recorded with its text,
    drawn by `seed`; of a conversation what its first answer needs.

    Raises InvalidRequest for a file without a prompt.
    """
    found, notes = _of_traffic(path, model) if is_traffic(path) else _of_rows(path, model)
    different = list(dict.fromkeys(tuple(ids) for ids in found))
    if not different:
        raise InvalidRequest(
            f"{path}: it holds no prompt to tune on{'; ' + notes[0] if notes else ''}"
        )
    random.Random(seed).shuffle(different)
    return TuningPrompts(path.name, [list(ids) for ids in different[:limit]], tuple(notes))


def _of_rows(path: Path, model: Model) -> tuple[list[list[int]], list[str]]:
    left_out = LeftOut()
    return [
        prompt.token_ids for prompt in read_prompts(path, model.tokenizer, left_out=left_out)
    ], left_out.lines()


def _of_traffic(path: Path, model: Model) -> tuple[list[list[int]], list[str]]:
    records, damaged = read_traffic(path)
    notes = [f"passed over {damaged} damaged lines"] if damaged else []
    with_text = [record for record in records if record.messages or record.text]
    if len(with_text) < len(records):
        notes.insert(
            0,
            f"left out {len(records) - len(with_text)} requests without text (--record-text records it)",
        )
    return [_encoded(record, model) for record in with_text], notes


def _encoded(record: Record, model: Model) -> list[int]:
    if record.text is not None:
        return model.encode(record.text, raw=True)
    return model.encode(list(record.messages or ()), thinking=record.thinking)


class Split(NamedTuple):
    """Which cases the search may look at, and which confirm what it found."""

    search: tuple[int, ...]
    confirm: tuple[int, ...]

    @property
    def is_clean(self) -> bool:
        return not set(self.search) & set(self.confirm)


FEWEST_CASES = 4
"""With fewer the search and its confirmation look at the same ones."""


def grouped(token_ids: Sequence[list[int]], concurrency: int) -> list[list[list[int]]]:
    """Cases of `concurrency` prompts each, the rest left out. Raises InvalidRequest for too few
    prompts."""
    if len(token_ids) < concurrency:
        raise InvalidRequest(
            f"concurrency: {concurrency} prompts together need as many, and there are {len(token_ids)}"
        )
    return [
        list(token_ids[start : start + concurrency])
        for start in range(0, len(token_ids) - concurrency + 1, concurrency)
    ]


def split(num_cases: int) -> Split:
    """A third to search with, two thirds to confirm; all for both where there are too few."""
    if num_cases < FEWEST_CASES:
        return Split(tuple(range(num_cases)), tuple(range(num_cases)))
    cut = max(2, num_cases // 3)
    return Split(tuple(range(cut)), tuple(range(cut, num_cases)))
