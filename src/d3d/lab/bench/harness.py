"""Run methods over sets: every method answers a prompt before the next prompt's turn comes, and
every answer is one row.

Plain comes first at each prompt, since the others are compared with its answer, and since a
conversation's next turn goes on from it; the others follow in an order that moves on by one with
every prompt. So what changes on the machine meanwhile (heat, other programs) meets all of them.
Each method warms up before it is measured."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from d3d.api import Model
from d3d.errors import InvalidRequest
from d3d.files import alone_in
from d3d.lab.bench import provenance
from d3d.lab.bench.answers import Question, Sampling, Setting
from d3d.lab.bench.identity import identity
from d3d.lab.bench.methods import PLAIN, Method, settings_for
from d3d.lab.bench.prompt_sets import Prompt, PromptSet
from d3d.lab.bench.recording import Measured, make_row
from d3d.lab.bench.rows import ROWS_FILE, Row, RowWriter, read_rows, row_key
from d3d.machine import PeakMemory, processor

WARM_UP_TOKENS = 8
WARM_UP = "Count from one to ten."
"""No set's prompt: a server that remembers prompts shall not have met the first one."""


@dataclass(frozen=True)
class Plan:
    """What a run asks, of whom, and how."""

    directory: Path
    sets: tuple[PromptSet, ...]
    max_tokens: tuple[int, ...] = (128,)
    batches: tuple[int, ...] = (1,)
    draft_lengths: tuple[int, ...] = ()
    """Empty: each method's own default."""
    sampling: Sampling = field(default_factory=Sampling)
    thinking: bool | None = None
    run_code: bool = False
    """Score answers of HumanEval and MBPP by running them."""


class Part(NamedTuple):
    """Prompts that are answered together, one turn of them, at one answer length."""

    prompts: tuple[Prompt, ...]
    turn: int
    max_tokens: int
    batch: int


class Cell(NamedTuple):
    """One method, asked in one way."""

    method: Method
    setting: Setting


class Benchmark:
    """A run, new or resumed."""

    def __init__(self, plan: Plan, model: Model, methods: Sequence[Method]) -> None:
        """Raises InvalidRequest for a method that none of the settings fits, and a draft length
        that is too long."""
        self._plan = plan
        self._model = model
        self._methods = list(methods)
        self._warm: set[tuple[Cell, int]] = set()
        if self._methods[0].name != PLAIN:
            raise ValueError("plain must come first: the others are compared with it")
        for method in self._methods:
            if not any(self._settings(method, *pair) for pair in self._shapes()):
                raise InvalidRequest(
                    f"method {method.name}: it answers one prompt at a time; add --batch 1, or leave it out"
                )

    def _shapes(self) -> Iterator[tuple[int, int]]:
        yield from itertools.product(self._plan.max_tokens, self._plan.batches)

    def _settings(self, method: Method, max_tokens: int, batch: int) -> list[Setting]:
        return settings_for(method, max_tokens, batch, self._plan.draft_lengths)

    @property
    def total(self) -> int:
        """Answers that the whole run has."""
        return sum(len(part.prompts) * len(self._cells(part)) for part in self._parts())

    def run(self, show: Callable[[int, str], None]) -> list[Row]:
        """Answer what has not been answered yet; `show` is told answers and what is done. Returns
        all rows of the run.

        Raises InvalidRequest where another process is at work in the directory, or the directory
        holds another run."""
        directory = self._plan.directory
        with alone_in(directory, "benchmark"):
            return self._run(directory, show)

    def _run(self, directory: Path, show: Callable[[int, str], None]) -> list[Row]:
        provenance.begin(
            directory,
            self._fixed(),
            self._about_sets(),
            {method.name: method.describe() for method in self._methods},
        )
        writer = RowWriter(directory / ROWS_FILE)
        rows = {row.key: row for row in read_rows(directory / ROWS_FILE)}
        done = 0
        for number, part in enumerate(self._parts()):
            for cell in _rotated(self._cells(part), number):
                keys = [
                    row_key(cell.method.name, cell.setting, p.set_name, p.prompt_id, part.turn)
                    for p in part.prompts
                ]
                if any(key not in rows for key in keys):
                    new = [row for row in self._measure(cell, part, rows) if row.key not in rows]
                    writer.append(new)
                    rows |= {row.key: row for row in new}
                done += len(part.prompts)
                show(done, f"{part.prompts[0].set_name}, {cell.method.name}")
        return list(rows.values())

    def _parts(self) -> Iterator[Part]:
        for (max_tokens, batch), prompt_set in itertools.product(self._shapes(), self._plan.sets):
            for start in range(0, len(prompt_set.prompts), batch):
                group = prompt_set.prompts[start : start + batch]
                for turn in range(max(prompt.num_turns for prompt in group)):
                    yield Part(
                        tuple(prompt for prompt in group if turn < prompt.num_turns),
                        turn,
                        max_tokens,
                        batch,
                    )

    def _cells(self, part: Part) -> list[Cell]:
        return [
            Cell(method, setting)
            for method in self._methods
            for setting in self._settings(method, part.max_tokens, part.batch)
        ]

    def _measure(self, cell: Cell, part: Part, rows: dict[tuple[Any, ...], Row]) -> list[Row]:
        plain = Setting(max_tokens=part.max_tokens, batch=part.batch)
        turns = [
            [
                rows[row_key(PLAIN, plain, prompt.set_name, prompt.prompt_id, turn)]
                for turn in range(part.turn)
            ]
            for prompt in part.prompts
        ]
        questions = [
            self._question(prompt, [row.text for row in said])
            for prompt, said in zip(part.prompts, turns, strict=True)
        ]
        self._warm_up(cell, len(questions))
        memory = PeakMemory(self._model.target.device)
        answers = cell.method.answer(questions, cell.setting)
        peak = memory.bytes()
        measured = [
            Measured(
                cell.method.name,
                cell.setting,
                prompt,
                part.turn,
                question,
                answer,
                peak,
                len(questions),
            )
            for prompt, question, answer in zip(part.prompts, questions, answers, strict=True)
        ]
        return [self._row(one, rows) for one in measured]

    def _row(self, measured: Measured, rows: dict[tuple[Any, ...], Row]) -> Row:
        compared = None
        if measured.method != PLAIN:
            setting = Setting(max_tokens=measured.setting.max_tokens, batch=measured.setting.batch)
            plain = rows[
                row_key(
                    PLAIN,
                    setting,
                    measured.prompt.set_name,
                    measured.prompt.prompt_id,
                    measured.turn,
                )
            ]
            compared = identity(
                self._model,
                measured.question,
                measured.answer,
                plain,
                measured.setting,
                self._plan.sampling,
            )
        return make_row(measured, compared, run_code=self._plan.run_code)

    def _question(self, prompt: Prompt, said: list[str]) -> Question:
        messages = prompt.conversation(said)
        return Question(self._model.encode(messages, thinking=self._plan.thinking), messages)

    def _warm_up(self, cell: Cell, batch_size: int) -> None:
        """Not measured: the first passes of a process, or of another width, are slower."""
        if (cell, batch_size) in self._warm:
            return
        messages = [{"role": "user", "content": WARM_UP}]
        question = Question(self._model.encode(messages, thinking=self._plan.thinking), messages)
        tokens = min(WARM_UP_TOKENS, cell.setting.max_tokens)
        cell.method.answer(
            [question] * batch_size, cell.setting.model_copy(update={"max_tokens": tokens})
        )
        self._warm.add((cell, batch_size))

    def _fixed(self) -> dict[str, Any]:
        target, sampling = self._model.target, self._plan.sampling
        return {
            "target": target.source,
            "engine": self._model.engine_name,
            "target_fingerprint": target.fingerprint,
            "dtype": self._model.dtype_name,
            "quantize": self._model.quantize,
            "device": self._model.device_name,
            "temperature": sampling.temperature,
            "seed": sampling.seed,
            "ignore_eos": sampling.ignore_eos,
            "thinking": self._plan.thinking,
            "processor": processor(),
            "threads": torch.get_num_threads(),
        }

    def _about_sets(self) -> dict[str, dict[str, Any]]:
        return {
            one.name: {
                "title": one.title,
                "sha256": one.sha256,
                "available": one.available,
                "asked": len(one.prompts),
            }
            for one in self._plan.sets
        }


def _rotated(cells: list[Cell], by: int) -> list[Cell]:
    """Plain first, the others in turn."""
    first = [cell for cell in cells if cell.method.name == PLAIN]
    rest = [cell for cell in cells if cell.method.name != PLAIN]
    shift = by % len(rest) if rest else 0
    return first + rest[shift:] + rest[:shift]
