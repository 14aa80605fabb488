"""Answers in the form of OpenAI's API: whole objects, and chunks of a stream."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

from d3d.engine.round import Round, TokenLogprob
from d3d.results import GenerationResult, StreamChunk

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


class Echo(NamedTuple):
    """A prompt with its log-probabilities, and its answer; None if none was wanted."""

    prompt_ids: list[int]
    logprobs: Sequence[TokenLogprob]
    result: GenerationResult | None


@dataclass
class Form:
    """Form of one request's answer."""

    model: str
    is_chat: bool
    tokenizer: PreTrainedTokenizerFast
    wants_ids: bool = False
    wants_logprobs: bool = False
    prompt_ids: list[list[int]] = field(default_factory=list)
    """One per choice."""
    id: str = ""
    created: int = field(default_factory=lambda: int(time.time()))

    _lengths: dict[int, int] = field(default_factory=dict)
    """Characters streamed so far, by choice."""

    def __post_init__(self) -> None:
        self.id = f"{'chatcmpl' if self.is_chat else 'cmpl'}-{uuid.uuid4().hex}"

    def echoed(self, answers: Sequence[Echo]) -> dict[str, Any]:
        """Text completions that begin with their prompts."""
        choices = []
        for index, answer in enumerate(answers):
            result = answer.result
            ids = [*answer.prompt_ids, *(() if result is None else result.token_ids)]
            choice: dict[str, Any] = {"index": index, "logprobs": None}
            text = "" if result is None else result.text
            choice["text"] = str(self.tokenizer.decode(answer.prompt_ids)) + text
            if self.wants_logprobs:
                entries = [*answer.logprobs, *(() if result is None else result.logprobs)]
                table = self._logprobs(entries)
                # the first token follows nothing
                first = self._piece(ids[0])
                choice["logprobs"] = {
                    "tokens": [first, *table["tokens"]],
                    "token_logprobs": [None, *table["token_logprobs"]],
                    "top_logprobs": [None, *table["top_logprobs"]],
                    "text_offset": [0, *(len(first) + place for place in table["text_offset"])],
                }
            choice["finish_reason"] = "length" if result is None else result.finish_reason
            choices.append(choice)
        num_answer = sum(len(each.result.token_ids) for each in answers if each.result is not None)
        return {
            **self._head("text_completion"),
            "choices": choices,
            "usage": usage(sum(len(each.prompt_ids) for each in answers), num_answer),
        }

    def whole(self, results: Sequence[GenerationResult], prompt_tokens: int) -> dict[str, Any]:
        """The answer of a request that is not streamed. prompt_tokens: of all prompts."""
        body = {
            **self._head("chat.completion" if self.is_chat else "text_completion"),
            "choices": [self._choice(index, result) for index, result in enumerate(results)],
            "usage": usage(prompt_tokens, sum(len(result.token_ids) for result in results)),
        }
        if len(results) == 1:
            body |= speculation_metrics(results[0])
        return body

    def opening(self, index: int) -> dict[str, Any] | None:
        """First chunk of a chat's stream, which carries the role."""
        if not self.is_chat:
            return None
        choice = {"index": index, "delta": {"role": "assistant", "content": ""}}
        return self._chunk([choice | {"logprobs": None, "finish_reason": None}])

    def chunk(self, index: int, chunk: StreamChunk) -> dict[str, Any] | None:
        """One round of an answer; None if there is nothing to tell yet."""
        reason = None if chunk.result is None else chunk.result.finish_reason
        if not (chunk.text or reason or (self.wants_ids and chunk.token_ids) or chunk.logprobs):
            return None
        choice: dict[str, Any] = {"index": index}
        choice |= {"delta": {"content": chunk.text}} if self.is_chat else {"text": chunk.text}
        choice["logprobs"] = None
        if self.wants_logprobs:
            table = choice["logprobs"] = self._logprobs(chunk.logprobs)
            if not self.is_chat:  # offsets run through the whole answer
                start = self._lengths.get(index, 0)
                table["text_offset"] = [start + place for place in table["text_offset"]]
                self._lengths[index] = start + sum(map(len, table["tokens"]))
        choice["finish_reason"] = reason
        if self.wants_ids:
            choice["token_ids"] = list(chunk.token_ids)
        return self._chunk([choice])

    def closing(self, results: Sequence[GenerationResult], prompt_tokens: int) -> dict[str, Any]:
        """Last chunk of a stream: the usage."""
        body = self._chunk([])
        body["usage"] = usage(prompt_tokens, sum(len(result.token_ids) for result in results))
        return body | (speculation_metrics(results[0]) if len(results) == 1 else {})

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self.is_chat else "text_completion"
        return {**self._head(kind), "choices": choices}

    def _choice(self, index: int, result: GenerationResult) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": index}
        if self.is_chat:
            choice["message"] = {"role": "assistant", "content": result.text, "refusal": None}
        else:
            choice["text"] = result.text
        choice["logprobs"] = self._logprobs(result.logprobs) if self.wants_logprobs else None
        choice["finish_reason"] = result.finish_reason
        if self.wants_ids:
            choice["token_ids"] = list(result.token_ids)
            choice["prompt_token_ids"] = self.prompt_ids[index]
        return choice

    def _logprobs(self, entries: Sequence[TokenLogprob]) -> dict[str, Any]:
        """Log-probabilities in the form of the chat or the text API."""
        if self.is_chat:
            return {
                "content": [
                    {
                        **self._token(entry.token_id, entry.logprob),
                        "top_logprobs": [self._token(*pair) for pair in entry.top],
                    }
                    for entry in entries
                ],
                "refusal": None,
            }
        texts = [self._piece(entry.token_id) for entry in entries]
        return {
            "tokens": texts,
            "token_logprobs": [entry.logprob for entry in entries],
            "top_logprobs": [
                {self._piece(token_id): logprob for token_id, logprob in entry.top}
                for entry in entries
            ],
            "text_offset": list(accumulate(map(len, texts[:-1]), initial=0))[: len(texts)],
        }

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        piece = self._piece(token_id)
        return {"token": piece, "logprob": logprob, "bytes": list(piece.encode())}

    def _piece(self, token_id: int) -> str:
        return str(self.tokenizer.decode([token_id]))


def usage(prompt_tokens: int, completion_tokens: int) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


def speculation_metrics(result: GenerationResult) -> dict[str, Any]:
    """Figures of speculative decoding under the keys of vLLM's per-request metrics; empty for plain
    decoding."""
    spec = result.speculation
    if spec is None:
        return {}
    drafted = [round_ for round_ in result.rounds if round_.draft_length]
    figures = {
        "mean_acceptance_length": spec.acceptance_length,
        "draft_acceptance_rate": spec.acceptance_rate,
        "acceptance_histogram": list(spec.num_accepted_histogram),
        "num_spec_steps": spec.rounds,
        "num_accepted_draft_tokens": num_accepted(drafted),
        "num_draft_tokens": num_drafted(drafted),
        "num_spec_tokens": spec.draft_length,
    }
    return {"metrics": {"speculative_decoding": figures}}


def num_accepted(rounds: Sequence[Round]) -> int:
    return sum(round_.num_accepted for round_ in rounds)


def num_drafted(rounds: Sequence[Round]) -> int:
    return sum(round_.draft_length for round_ in rounds)
