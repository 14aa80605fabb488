"""Have the target answer prompts, many at a time, and keep the answers as training samples."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from d3d.core.types import SamplingParams
from d3d.decoding.loop import decode
from d3d.decoding.request import Request, new_request
from d3d.errors import InvalidRequest
from d3d.hub.chat import encode_chat
from d3d.hub.open_model import OpenModel
from d3d.target.native import NativeEngine
from d3d.train.corpus import Sample
from d3d.train.corpus_writer import answer_key
from d3d.train.prompts import LeftOut, Prompt
from d3d.train.top_logits import RecordingEngine, TopLogits


@dataclass(frozen=True)
class AnswerOptions:
    """How answers are written."""

    max_tokens: int = 256
    temperatures: tuple[float, ...] = (0.0,)
    """Each prompt is answered at each of them; 0 is greedy."""
    batch: int = 48
    seed: int = 0
    top_logits: int = 0
    """How many of the target's best logits to keep at each token."""
    thinking: bool | None = None
    """For the turns that follow an answer."""


class Answers(NamedTuple):
    """A batch that has been answered, or some turns of which nothing had to be written."""

    samples: list[Sample]
    top_logits: list[TopLogits] | None
    turns_done: int
    """How many of the turns that there are to answer are settled with this."""


class _Turn(NamedTuple):
    prompt: Prompt
    temperature: float


@dataclass(frozen=True)
class Answering:
    """Answers prompts with a model."""

    model: OpenModel
    options: AnswerOptions
    known: Mapping[bytes, list[int]] = field(default_factory=dict)
    """Answers that need not be written again, by `answer_key`; the turns after them are."""
    left_out: LeftOut = field(default_factory=LeftOut)

    def num_turns(self, prompts: list[Prompt]) -> int:
        return len(self.options.temperatures) * sum(1 + len(prompt.later) for prompt in prompts)

    def run(self, prompts: list[Prompt]) -> Iterator[Answers]:
        """Answers in batches of prompts of like length, in a random order of batches; first all
        first turns, then the second.

        The noise of a sampled answer hangs on `options.seed` and the prompt alone, so a continued
        corpus equals one that was never interrupted; its seed is in the sample. Prompts that leave
        no room for an answer go to `left_out`, and what would follow them."""
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
                    self.left_out.add(
                        "a prompt that leaves no room for an answer in the target's context",
                        turn.prompt.where,
                    )
                    settled += 1 + len(turn.prompt.later)
                else:
                    todo.append(turn)
            yield Answers([], None, settled)
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

    def _answer(self, turns: list[_Turn]) -> Answers:
        engine = NativeEngine(self.model.transformer)
        recorder = (
            RecordingEngine(engine, self.options.top_logits) if self.options.top_logits else None
        )
        requests = [self._request(engine, turn) for turn in turns]
        for _ in decode(recorder or engine, None, requests):
            pass
        samples = [
            Sample(
                turn.prompt.token_ids,
                request.sequence.answer_ids,
                turn.prompt.source,
                turn.temperature,
                request.sequence.seed,
            )
            for turn, request in zip(turns, requests, strict=True)
        ]
        return Answers(samples, recorder.recorded() if recorder else None, len(samples))

    def _request(self, engine: NativeEngine, turn: _Turn) -> Request:
        seed = prompt_seed(turn.prompt.token_ids, self.options.seed)
        params = SamplingParams(
            temperature=turn.temperature, max_tokens=self.options.max_tokens, seed=seed
        )
        return new_request(
            engine, turn.prompt.token_ids, params, eos_token_ids=self.model.eos_token_ids
        )

    def _next(self, turn: _Turn, answer_ids: list[int]) -> list[_Turn]:
        """The turn that follows an answer, if the user has more to say."""
        prompt = turn.prompt
        if not prompt.later:
            return []
        answer = self.model.tokenizer.decode(answer_ids, skip_special_tokens=True)
        said = (
            {"role": "assistant", "content": str(answer)},
            {"role": "user", "content": prompt.later[0]},
        )
        messages = (*prompt.messages, *said)
        try:
            token_ids = encode_chat(
                self.model.tokenizer, list(messages), thinking=self.options.thinking
            )
        except InvalidRequest as error:
            self.left_out.add(str(error), prompt.where)
            return []
        return [
            turn._replace(
                prompt=prompt._replace(
                    token_ids=token_ids, messages=messages, later=prompt.later[1:]
                )
            )
        ]


def prompt_seed(token_ids: list[int], seed: int) -> int:
    """A seed below 2**53 for one prompt of a corpus."""
    digest = hashlib.sha256(f"{seed} {token_ids}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 11
