"""A server with OpenAI's chat API: vLLM, SGLang, llama.cpp's, or our own."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from d3d.errors import InvalidRequest
from d3d.json_text import to_json
from d3d.lab.bench.answers import Delivery, DeliveryTimer, Question, Setting, TimedAnswer
from d3d.lab.bench.peers import needed

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

TIMEOUT_S = 600.0
MOST_WORDS = 300
"""Characters of an error that are kept."""
ABORTED = ("abort", "error", "cancelled")
"""Finish reasons of answers that are not whole."""
TEXT_FIELDS = ("reasoning_content", "reasoning", "content")
"""Fields of a delta that hold answer tokens; servers name them differently."""


class OpenAIServer:
    """Streams chat completions. The server applies its own chat template to the messages."""

    def __init__(
        self,
        url: str,
        model: str | None = None,
        *,
        api_key: str | None = None,
        tokenizer: PreTrainedTokenizerFast | None = None,
        transport: Any = None,
    ) -> None:
        """url: up to and including `/v1`. model: default: the server's first. tokenizer: counts
        tokens if the server does not. transport: of the HTTP client, for tests. Raises
        MissingExtra, and InvalidRequest if no server answers."""
        self._http = needed("httpx2", "a server by its URL")
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._url = url.rstrip("/")
        self._tokenizer = tokenizer
        self._client = self._http.Client(timeout=TIMEOUT_S, headers=headers, transport=transport)
        self._model = model or self._first_model()

    def _first_model(self) -> str:
        try:
            reply = self._client.get(f"{self._url}/models")
            reply.raise_for_status()
            return str(reply.json()["data"][0]["id"])
        except (
            *(self._http.HTTPError, self._http.InvalidURL),
            *(ValueError, KeyError, IndexError, TypeError),
        ) as error:
            raise InvalidRequest(
                f"method server: {self._url} names no model ({type(error).__name__}: {error}); "
                "check --server-url, or name one with --server-model"
            ) from error

    def answer(self, question: Question, setting: Setting) -> TimedAnswer:
        """The answer's `error` is what the server tells in the stream, or that the stream breaks
        off. Raises InvalidRequest if the server refuses the request, or does not answer."""
        body = {
            "model": self._model,
            "messages": question.messages,
            "max_tokens": setting.max_tokens,
            "temperature": 0.0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        timer = DeliveryTimer()
        pieces: list[tuple[float, str]] = []
        finish, usage, error = None, None, None
        for chunk in self._chunks(body):
            error = error or _error_in(chunk)
            usage = (chunk.get("usage") or {}).get("completion_tokens", usage)
            for choice in chunk.get("choices") or []:
                delta = choice.get("delta") or {}
                text = "".join(delta.get(name) or "" for name in TEXT_FIELDS)
                if text:
                    pieces.append((timer.elapsed(), text))
                finish = choice.get("finish_reason") or finish
        wall_s = timer.elapsed()
        text = "".join(text for _, text in pieces)
        count = int(usage) if usage is not None else self._count(text)
        error = error or _not_whole(finish)
        return TimedAnswer(
            text,
            None,
            count,
            finish or "error",
            tuple(spread(pieces, count)),
            wall_s=wall_s,
            error=error and f"the server broke off: {error}",
        )

    def _chunks(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        try:
            with self._client.stream("POST", f"{self._url}/chat/completions", json=body) as reply:
                if reply.status_code >= 400:
                    reply.read()
                    told = f"{reply.status_code}: {reply.text[:MOST_WORDS]}"
                    raise InvalidRequest(f"method server: {self._url} answers {told}")
                yield from self._streamed(reply)
        except self._http.HTTPError as error:
            raise InvalidRequest(
                f"method server: {self._url} does not answer ({type(error).__name__}: {error})"
            ) from error

    def _streamed(self, reply: Any) -> Iterator[dict[str, Any]]:
        """The chunks of a reply; if it breaks off, the last one holds the error."""
        try:
            for line in reply.iter_lines():
                content = line.removeprefix("data:").strip()
                if line.startswith("data:") and content != "[DONE]":
                    chunk = json.loads(content)
                    yield chunk if isinstance(chunk, dict) else {"error": content}
        except (self._http.HTTPError, ValueError) as error:
            yield {"error": f"{type(error).__name__}: {error}"}

    def _count(self, text: str) -> int:
        if self._tokenizer is None:
            return 0
        return len(self._tokenizer.encode(text, add_special_tokens=False))

    def describe(self) -> dict[str, Any]:
        return {
            "url": self._url,
            "model": self._model,
            "note": "token counts of single deliveries are shared out by characters",
        }

    def close(self) -> None:
        self._client.close()


def _error_in(chunk: dict[str, Any]) -> str | None:
    """The server's words, if a chunk tells of an error."""
    error = chunk if chunk.get("object") == "error" else chunk.get("error")
    if isinstance(error, dict):
        error = error.get("message") or to_json(error, ensure_ascii=False)
    return None if error is None else str(error)[:MOST_WORDS]


def _not_whole(finish: str | None) -> str | None:
    if finish is None:
        return "the stream ended without a finish_reason"
    return f"finish_reason {finish}" if finish in ABORTED else None


def spread(pieces: list[tuple[float, str]], count: int) -> Iterator[Delivery]:
    """Distribute the answer's tokens over its pieces by characters, at least one to the first: a
    server reports their total only."""
    characters = sum(len(text) for _, text in pieces)
    seen = given = 0
    for place, (at_s, text) in enumerate(pieces):
        seen += len(text)
        due = count if place == len(pieces) - 1 else max(1, round(count * seen / characters))
        if due > given:
            yield Delivery(at_s, due - given)
            given = due
