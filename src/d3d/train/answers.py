"""From prompts to a corpus: have the target answer prompts, many at a time, and write its answers.

A run may be interrupted; a manifest records what it read, left out and wrote."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from d3d.engine.engine import Engine
from d3d.engine.request import Request, new_request
from d3d.engine.sampling import SamplingParams, sample_match
from d3d.errors import InvalidRequest
from d3d.hub.open_model import OpenModel
from d3d.inputs import input_path, refuse_packed
from d3d.target.native import NativeTarget
from d3d.text.answers import decode_answer
from d3d.text.prompts import encode_chat, heeds_thinking
from d3d.train.corpus import Sample, answer_key
from d3d.train.corpus_writer import AnswerEnds, CorpusWriter, hold_corpus, writer_identity
from d3d.train.evaluation_sets import SETS
from d3d.train.prompts import NO_ROOM, LeftOut, PromptOptions, TrainingPrompt, draw_prompts
from d3d.train.top_logits import TopLogits, TopLogitsRecorder


@dataclass(frozen=True)
class AnswerOptions:
    """Settings by which answers are written."""

    max_tokens: int = 256
    temperatures: tuple[float, ...] = (0.0,)
    """Each prompt is answered at each of them; 0 is greedy."""
    batch: int = 48
    seed: int = 0
    top_logits: int = 0
    """Number of the target's best logits to keep at each token."""
    thinking: bool | None = None
    """Thinking switch of the turns that follow an answer."""


class AnswerBatch(NamedTuple):
    """Answers that were written together; none if their turns needed no new answer."""

    samples: list[Sample]
    top_logits: list[TopLogits] | None
    turns_done: int
    """Turns that are settled by this batch."""


class _Turn(NamedTuple):
    prompt: TrainingPrompt
    temperature: float


@dataclass(frozen=True)
class Answering:
    """Answers prompts with a model."""

    model: OpenModel
    options: AnswerOptions
    known: Mapping[bytes, list[int]] = field(default_factory=dict)
    """Answers that exist already, by `answer_key`; only the turns after them are answered."""
    left_out: LeftOut = field(default_factory=LeftOut)

    def num_turns(self, prompts: list[TrainingPrompt]) -> int:
        return len(self.options.temperatures) * sum(1 + len(prompt.later) for prompt in prompts)

    def run(self, prompts: list[TrainingPrompt]) -> Iterator[AnswerBatch]:
        """Answer all first turns, then all second turns, and so on, in batches of prompts of like
        length, in random order.

        The noise of a sampled answer depends only on `options.seed` and the prompt, so a continued
        corpus equals an uninterrupted one; the answer's seed is in its sample. Prompts that leave
        no room for an answer go to `left_out`, with their later turns."""
        wave = [
            _Turn(prompt, temperature)
            for temperature in self.options.temperatures
            for prompt in prompts
        ]
        while wave:
            following: list[_Turn] = []
            todo: list[_Turn] = []
            settled = 0
            for turn in wave:
                answer = self.known.get(answer_key(turn.prompt.token_ids, turn.temperature))
                if answer is not None:
                    following += self._next(turn, answer)
                    settled += 1
                elif len(turn.prompt.token_ids) >= self.model.config.max_length:
                    self.left_out.add(NO_ROOM, turn.prompt.where)
                    settled += 1 + len(turn.prompt.later)
                else:
                    todo.append(turn)
            yield AnswerBatch([], None, settled)
            for batch in self._batches(todo):
                answers = self._answer(batch)
                for turn, sample in zip(batch, answers.samples, strict=True):
                    following += self._next(turn, sample.answer_ids)
                yield answers
            wave = following

    def _batches(self, turns: list[_Turn]) -> list[list[_Turn]]:
        ordered = sorted(turns, key=lambda turn: len(turn.prompt.token_ids))
        size = self.options.batch
        batches = [ordered[start : start + size] for start in range(0, len(ordered), size)]
        random.Random(self.options.seed).shuffle(batches)
        return batches

    def _answer(self, turns: list[_Turn]) -> AnswerBatch:
        target = NativeTarget(self.model.transformer)
        recorder = TopLogitsRecorder(self.options.top_logits) if self.options.top_logits else None
        requests = [self._request(target, turn) for turn in turns]
        engine = Engine(target, accept=recorder or sample_match)
        for _ in engine.run(requests):
            pass
        samples = [
            Sample(
                turn.prompt.token_ids,
                request.answer_ids,
                turn.prompt.source,
                turn.temperature,
                request.seed,
            )
            for turn, request in zip(turns, requests, strict=True)
        ]
        top_logits = [recorder.recorded(request) for request in requests] if recorder else None
        return AnswerBatch(samples, top_logits, len(samples))

    def _request(self, target: NativeTarget, turn: _Turn) -> Request:
        seed = prompt_seed(turn.prompt.token_ids, self.options.seed)
        params = SamplingParams(
            temperature=turn.temperature, max_tokens=self.options.max_tokens, seed=seed
        )
        return new_request(
            target, turn.prompt.token_ids, params, eos_token_ids=self.model.eos_token_ids
        )

    def _next(self, turn: _Turn, answer_ids: list[int]) -> list[_Turn]:
        """The user's next turn after an answer, if there is one."""
        prompt = turn.prompt
        if not prompt.later:
            return []
        answer = decode_answer(self.model.tokenizer, answer_ids)
        messages = (
            *prompt.messages,
            {"role": "assistant", "content": answer},
            {"role": "user", "content": prompt.later[0]},
        )
        try:
            token_ids = encode_chat(
                self.model.tokenizer, list(messages), thinking=self.options.thinking
            )
        except InvalidRequest as error:
            self.left_out.add(str(error), prompt.where)
            return []
        later = prompt._replace(token_ids=token_ids, messages=messages, later=prompt.later[1:])
        return [turn._replace(prompt=later)]


def prompt_seed(token_ids: list[int], seed: int) -> int:
    """A seed below 2**53 for a prompt of a corpus."""
    digest = hashlib.sha256(f"{seed} {token_ids}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 11


@dataclass(frozen=True)
class CorpusPlan:
    """Options of a run of `d3d data`."""

    corpus: Path
    prompts: tuple[str, ...]
    exclude: tuple[str, ...] = ()
    prompt_options: PromptOptions = field(default_factory=PromptOptions)
    answers: AnswerOptions = field(default_factory=AnswerOptions)
    shard_answers: int | None = None

    def check(self) -> None:
        """Raise InvalidRequest for options that contradict each other, and for names that no file
        can have."""
        refuse_packed(self.corpus)
        for source in (*self.prompts, *self.exclude):
            input_path(source)
        if not self.prompt_options.suffix and self.prompt_options.suffix_share != 1.0:
            raise InvalidRequest(
                "--suffix-share says how many prompts get the suffix; give one with --suffix"
            )
        if len(set(self.answers.temperatures)) < len(self.answers.temperatures):
            raise InvalidRequest(
                "--temperature: one of them is given twice; each prompt is answered once at each "
                "temperature"
            )


class CorpusRun:
    """Starts a corpus, or continues one: the constructor draws prompts and opens files, `write`
    writes the answers. In between it holds the corpus against other processes."""

    def __init__(self, model: OpenModel, plan: CorpusPlan) -> None:
        """Raises InvalidRequest, InvalidCheckpoint, CantWrite and MissingExtra as `draw_prompts`,
        `hold_corpus` and `CorpusWriter` do, before anything is written."""
        plan.check()
        self._held = hold_corpus(plan.corpus, plan.shard_answers).hold()
        try:
            self._open(model, plan)
        except BaseException:
            self._held.release()
            raise

    def _open(self, model: OpenModel, plan: CorpusPlan) -> None:
        options = plan.prompt_options
        self._model, self._plan = model, plan
        self._drawn = draw_prompts(plan.prompts, model.tokenizer, options, exclude=plan.exclude)
        identity = writer_identity(
            model,
            thinking=options.thinking if heeds_thinking(model.tokenizer) else None,
            top_logits=plan.answers.top_logits,
            evaluation_prompts=options.evaluation_prompts == "allow"
            and bool(self._drawn.evaluation.counts),
        )
        ends = AnswerEnds(model.eos_token_ids, plan.answers.max_tokens, model.config.max_length)
        self._writer = CorpusWriter(plan.corpus, identity, plan.shard_answers, ends)
        self._answering = Answering(model, plan.answers, self._writer.known, self.left_out)
        self.num_turns = self._answering.num_turns(self._drawn.prompts)
        """Answers of the finished corpus, those that exist already included."""
        self.turns_done = self.new_answers = self.new_tokens = 0

    @property
    def left_out(self) -> LeftOut:
        """Prompts that were not used so far, by reason."""
        return self._drawn.left_out

    @property
    def answers(self) -> int:
        """Answers in the corpus, those of earlier runs included."""
        return self._writer.answers

    @property
    def replaced(self) -> int:
        """Answers that an earlier run had cut, and that this one has written anew."""
        return self._writer.replaced

    @property
    def cut(self) -> int:
        """Answers in the corpus that ended before their natural end."""
        return self._writer.cut

    def write(self, on_batch: Callable[[], None]) -> None:
        """Write the answers that the corpus lacks, and those anew that were cut and would now be
        longer. Raises CantWrite; the answers before it stay."""
        try:
            self._write(on_batch)
        finally:
            self._held.release()

    def _write(self, on_batch: Callable[[], None]) -> None:
        self._writer.start()
        for batch in self._answering.run(self._drawn.prompts):
            self._writer.append(batch.samples, batch.top_logits)
            self.new_answers += len(batch.samples)
            self.new_tokens += sum(len(sample.answer_ids) for sample in batch.samples)
            self.turns_done += batch.turns_done
            self._writer.write_manifest(self._record(complete=False))
            on_batch()
        self._writer.write_manifest(self._record(complete=True))

    def _record(self, *, complete: bool) -> dict[str, Any]:
        """This run's entry in the manifest."""
        plan, drawn, first = self._plan, self._drawn, self.left_out.first
        return {
            "d3d": version("d3d-decoding"),
            "complete": complete,
            "answers": self.new_answers,
            "answer_tokens": self.new_tokens,
            "replaced": self._writer.replaced,
            "prompts": [
                {"from": source.spec, "sha256": source.sha256, "rows": len(source.rows)}
                for source in drawn.sources
            ],
            "drawn": len(drawn.prompts),
            "left_out": [
                {"reason": reason, "rows": rows, "first": first[reason]}
                for reason, rows in self.left_out.counts.items()
            ],
            "fields_not_read": self.left_out.fields,
            "exclude": list(plan.exclude),
            "options": asdict(plan.prompt_options) | asdict(plan.answers),
            "evaluation_sets": {
                "looked_for": list(SETS.values()),
                "found": {SETS[name]: count for name, count in drawn.evaluation.counts.items()},
            },
            "dtype": str(self._model.transformer.embedding.dtype).removeprefix("torch."),
            "device": str(self._model.transformer.device),
        }
