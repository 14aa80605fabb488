"""The prompts to tune on: a user's own, or recorded traffic."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from d3d.api import Model
from d3d.errors import InvalidRequest
from d3d.lab.tune.traffic import Record, ids_sha256, is_traffic, read_traffic
from d3d.train.prompts import NO_ROOM, LeftOut, read_prompts

FEWEST_CASES = 4
"""With fewer, search and confirmation share them."""


class TuningPrompts(NamedTuple):
    """Prompts and the name of their file."""

    name: str
    token_ids: list[list[int]]
    notes: tuple[str, ...] = ()
    """For people: what was left out."""

    @property
    def sha256(self) -> str:
        """Hash of the prompts, in order."""
        return hashlib.sha256(" ".join(map(ids_sha256, self.token_ids)).encode()).hexdigest()


def tuning_prompts(path: Path, model: Model, *, limit: int, seed: int) -> TuningPrompts:
    """At most `limit` different prompts, drawn by `seed`, of a file of rows or of traffic recorded
    with its text; of a conversation, up to its first answer. Raises InvalidRequest if there is
    none."""
    left_out = LeftOut()
    read = _of_traffic if is_traffic(path) else _of_rows
    prompts = read(path, model, left_out)
    notes = left_out.lines()
    different = list(dict.fromkeys(map(tuple, prompts)))
    if not different:
        problem = "; ".join(["it holds no prompt to tune on", *notes[:1]])
        raise InvalidRequest(f"{path}: {problem}")
    random.Random(seed).shuffle(different)
    return TuningPrompts(path.name, [list(ids) for ids in different[:limit]], tuple(notes))


def _of_rows(path: Path, model: Model, left_out: LeftOut) -> list[list[int]]:
    prompts = read_prompts(path, model.tokenizer, left_out=left_out)
    longest = model.target.max_length
    for prompt in prompts:
        if len(prompt.token_ids) >= longest:
            left_out.add(NO_ROOM, prompt.where)
    return [prompt.token_ids for prompt in prompts if len(prompt.token_ids) < longest]


def _of_traffic(path: Path, model: Model, left_out: LeftOut) -> list[list[int]]:
    records, damaged = read_traffic(path)
    for _ in range(damaged):
        left_out.add("a damaged line", str(path))
    prompts = []
    for number, record in enumerate(records, 1):
        where = f"{path}, request {number}"
        if not (record.messages or record.text):
            left_out.add("a request without text (--record-text records it)", where)
            continue
        try:
            token_ids = _encoded(record, model)
        except InvalidRequest as error:
            left_out.add(str(error), where)
            continue
        if len(token_ids) < model.target.max_length:
            prompts.append(token_ids)
        else:
            left_out.add(NO_ROOM, where)
    return prompts


def _encoded(record: Record, model: Model) -> list[int]:
    if record.text is not None:
        return model.encode(record.text, raw=True)
    return model.encode(list(record.messages or ()), thinking=record.thinking)


class CaseSplit(NamedTuple):
    """The cases of the search, and those that confirm its result."""

    search: tuple[int, ...]
    confirm: tuple[int, ...]

    @property
    def is_clean(self) -> bool:
        return not set(self.search) & set(self.confirm)


def grouped(token_ids: Sequence[list[int]], concurrency: int) -> list[list[list[int]]]:
    """Cases of `concurrency` prompts each; the rest is left out. Raises InvalidRequest if there are
    too few prompts."""
    if len(token_ids) < concurrency:
        raise InvalidRequest(
            f"concurrency: {concurrency} prompts together need as many, and there are "
            f"{len(token_ids)}"
        )
    starts = range(0, len(token_ids) - concurrency + 1, concurrency)
    return [list(token_ids[start : start + concurrency]) for start in starts]


def split(num_cases: int) -> CaseSplit:
    """A third for the search, two thirds to confirm; all for both if there are too few."""
    cases = tuple(range(num_cases))
    if num_cases < FEWEST_CASES:
        return CaseSplit(cases, cases)
    cut = max(2, num_cases // 3)
    return CaseSplit(cases[:cut], cases[cut:])
