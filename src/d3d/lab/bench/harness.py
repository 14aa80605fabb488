"""Runs methods over sets. Each method answers a prompt before the next prompt begins.

Plain answers each prompt first: the others are compared with its answer, and a conversation goes on
from it. The order of the others rotates from prompt to prompt, so a machine that changes meanwhile
(heat, other programs) affects all alike. Each method warms up before it is measured."""

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
from d3d.lab.bench import results
from d3d.lab.bench.answers import PLAIN, Question, Sampling, Setting, TimedAnswer
from d3d.lab.bench.lossless import identity
from d3d.lab.bench.methods import Method, settings_for
from d3d.lab.bench.own import sampling_params
from d3d.lab.bench.prompt_sets import BenchPrompt, PromptSet
from d3d.lab.bench.rows import ROWS_FILE, Row, RowKey, answer_fields, append_rows, read_rows
from d3d.lab.bench.scorers import score
from d3d.machine import PeakMemory, processor
from d3d.train.prompts import NO_ROOM, LeftOut

WARM_UP_TOKENS = 8
WARM_UP = "Count from one to ten."
"""In no set: a server with a prompt cache must not know the first measured prompt."""


@dataclass(frozen=True)
class BenchPlan:
    """Sets and settings of a run."""

    directory: Path
    sets: tuple[PromptSet, ...]
    max_tokens: tuple[int, ...] = (128,)
    batches: tuple[int, ...] = (1,)
    draft_lengths: tuple[int, ...] = ()
    """Empty: each method's default."""
    sampling: Sampling = field(default_factory=Sampling)
    thinking: bool | None = None
    run_code: bool = False
    """Score answers of HumanEval and MBPP by running them."""


class TurnBatch(NamedTuple):
    """One turn of prompts that are answered together."""

    prompts: tuple[BenchPrompt, ...]
    turn: int
    plain: Setting
    questions: tuple[Question, ...] = ()
    """The prompts with the answers so far."""


class MethodSetting(NamedTuple):
    """A method at one of its settings."""

    method: Method
    setting: Setting


class Benchmark:
    """A run, new or resumed."""

    def __init__(self, plan: BenchPlan, model: Model, methods: Sequence[Method]) -> None:
        """Raises InvalidRequest for a method that fits none of the settings, and for a draft length
        that is too long."""
        self._plan = plan
        self._model = model
        self._methods = list(methods)
        self._warm: set[tuple[MethodSetting, int]] = set()
        self._told: set[tuple[str, str]] = set()
        self.left_out = LeftOut()
        """Prompts that can't be asked, such as those longer than the context."""
        if self._methods[0].name != PLAIN:
            raise ValueError("plain must come first: the others are compared with it")
        for method in self._methods:
            if not any(self._settings(method, plain) for plain in self._plain_settings()):
                raise InvalidRequest(
                    f"method {method.name}: it answers one prompt at a time; "
                    "add --batch 1, or leave it out"
                )

    def _plain_settings(self) -> Iterator[Setting]:
        for max_tokens, batch in itertools.product(self._plan.max_tokens, self._plan.batches):
            yield Setting(max_tokens=max_tokens, batch=batch)

    def _settings(self, method: Method, plain: Setting) -> list[Setting]:
        return settings_for(method, plain.max_tokens, plain.batch, self._plan.draft_lengths)

    @property
    def total(self) -> int:
        """Answers of the whole run."""
        return sum(len(part.prompts) * len(self._rotated(part, 0)) for part in self._turns())

    def run(self, show: Callable[[int, str], None]) -> list[Row]:
        """Measure missing answers and return all rows; `show` takes the number of answers and the
        last set and method.

        Raises InvalidRequest if another process works in the directory, or it holds a different
        run."""
        with alone_in(self._plan.directory, "benchmark"):
            return self._run(self._plan.directory / ROWS_FILE, show)

    def _run(self, file: Path, show: Callable[[int, str], None]) -> list[Row]:
        about = {method.name: method.describe() for method in self._methods}
        results.begin(self._plan.directory, self._fixed(), self._about_sets(), about)
        rows = {row.key: row for row in read_rows(file) if row.error is None}
        done = 0
        for number, whole in enumerate(self._turns()):
            part = self._askable(whole, rows)
            for chosen in self._rotated(part, number):
                name, setting = chosen.method.name, chosen.setting
                if any(
                    _key(name, setting, prompt, part.turn) not in rows for prompt in part.prompts
                ):
                    new = [row for row in self._measure(chosen, part, rows) if row.key not in rows]
                    append_rows(file, new)
                    rows |= {row.key: row for row in new}
                done += len(whole.prompts)
                show(done, f"{whole.prompts[0].set_name}, {name}")
        return list(rows.values())

    def _turns(self) -> Iterator[TurnBatch]:
        for plain, prompt_set in itertools.product(self._plain_settings(), self._plan.sets):
            for start in range(0, len(prompt_set.prompts), plain.batch):
                group = prompt_set.prompts[start : start + plain.batch]
                for turn in range(max(prompt.num_turns for prompt in group)):
                    asked = tuple(prompt for prompt in group if turn < prompt.num_turns)
                    yield TurnBatch(asked, turn, plain)

    def _askable(self, part: TurnBatch, rows: dict[RowKey, Row]) -> TurnBatch:
        """The prompts that can be asked, with their questions; the others are left out for good."""
        asked: list[tuple[BenchPrompt, Question]] = []
        for prompt in part.prompts:
            before = [_key(PLAIN, part.plain, prompt, turn) for turn in range(part.turn)]
            if not all(key in rows for key in before):
                continue
            try:
                question = self._question(prompt.conversation([rows[key].text for key in before]))
            except InvalidRequest as error:
                self._leave_out(prompt, str(error))
                continue
            if len(question.token_ids) >= self._model.target.max_length:
                self._leave_out(prompt, NO_ROOM)
            else:
                asked.append((prompt, question))
        return part._replace(
            prompts=tuple(prompt for prompt, _ in asked),
            questions=tuple(question for _, question in asked),
        )

    def _leave_out(self, prompt: BenchPrompt, reason: str) -> None:
        if (prompt.set_name, prompt.prompt_id) not in self._told:
            self._told.add((prompt.set_name, prompt.prompt_id))
            self.left_out.add(reason, prompt.where)

    def _rotated(self, part: TurnBatch, by: int) -> list[MethodSetting]:
        """Plain first, the others rotated."""
        first, *rest = [
            MethodSetting(method, setting)
            for method in self._methods
            for setting in self._settings(method, part.plain)
        ]
        shift = by % len(rest) if rest else 0
        return [first, *rest[shift:], *rest[:shift]]

    def _measure(
        self, chosen: MethodSetting, part: TurnBatch, rows: dict[RowKey, Row]
    ) -> list[Row]:
        questions = part.questions
        self._warm_up(chosen, len(questions))
        memory = PeakMemory(self._model.target.device)
        answers = chosen.method.answer(questions, chosen.setting)
        peak = memory.bytes()
        found = []
        for prompt, question, answer in zip(part.prompts, questions, answers, strict=True):
            key = _key(chosen.method.name, chosen.setting, prompt, part.turn)
            plain = rows.get(_key(PLAIN, part.plain, prompt, part.turn))
            found.append(self._row(key, prompt, question, answer, plain, peak, len(questions)))
        return found

    def _row(
        self,
        key: RowKey,
        prompt: BenchPrompt,
        question: Question,
        answer: TimedAnswer,
        plain: Row | None,
        peak: int,
        batch_size: int,
    ) -> Row:
        compared = right = None
        if key.method != PLAIN and plain is not None and answer.error is None:
            params = sampling_params(key.setting, self._plan.sampling)
            compared = identity(self._model, question, answer, plain, params)
        if (
            key.turn == prompt.num_turns - 1 and answer.error is None
        ):  # the reference belongs to the last turn
            right = score(answer.text, prompt.reference, run_code=self._plan.run_code)
        return Row(
            **key._asdict(),
            prompt_tokens=len(question.token_ids),
            identity=compared,
            peak_memory_bytes=peak,
            score=right,
            **answer_fields(answer, batch_size),
        )

    def _question(self, messages: list[dict[str, str]]) -> Question:
        return Question(self._model.encode(messages, thinking=self._plan.thinking), messages)

    def _warm_up(self, chosen: MethodSetting, batch_size: int) -> None:
        """Not measured: the first passes of a process, or of a new width, are slower."""
        if (chosen, batch_size) in self._warm:
            return
        question = self._question([{"role": "user", "content": WARM_UP}])
        tokens = min(WARM_UP_TOKENS, chosen.setting.max_tokens)
        short = chosen.setting.model_copy(update={"max_tokens": tokens})
        for answer in chosen.method.answer([question] * batch_size, short):
            if answer.error is not None:
                raise InvalidRequest(f"method {chosen.method.name}: {answer.error}")
        self._warm.add((chosen, batch_size))

    def _fixed(self) -> dict[str, Any]:
        target, sampling = self._model.target, self._plan.sampling
        return {
            "target": target.source,
            "engine": self._model.backend,
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
            prompt_set.name: {
                "title": prompt_set.title,
                "sha256": prompt_set.sha256,
                "available": prompt_set.available,
                "asked": len(prompt_set.prompts),
            }
            for prompt_set in self._plan.sets
        }


def _key(method: str, setting: Setting, prompt: BenchPrompt, turn: int) -> RowKey:
    return RowKey(method, setting, prompt.set_name, prompt.prompt_id, turn)
