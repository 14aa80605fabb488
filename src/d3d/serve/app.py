"""The HTTP interface: routes, keys, limits and errors."""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from typing import Any, TypeVar

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from d3d.api import Prompt
from d3d.engine.round import TokenLogprob
from d3d.errors import D3DError, InvalidRequest
from d3d.json_text import to_json
from d3d.results import GenerationResult
from d3d.serve.answers import Echo, Form
from d3d.serve.prometheus import ServeMetrics
from d3d.serve.protocol import (
    MOST_PROMPTS,
    BadRequest,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    GenerationBody,
    TokenizeBody,
    parsed,
)
from d3d.serve.service import Job, Service
from d3d.serve.streams import EventStream, events, unless_gone, whole_answers

LOG = logging.getLogger("d3d.serve")
Result = TypeVar("Result")

OPEN_PATHS = frozenset({"/health", "/ready", "/version", "/metrics"})
"""Paths that need no key; they tell counts and versions only."""


@dataclass(frozen=True)
class Access:
    """Who may ask, and how much."""

    api_key: str | None = None
    hosts: frozenset[str] | None = None
    """Names by which it may be called; None for any. Without them a web page whose own name leads
    here could use a server without a key."""
    max_body_bytes: int = 8 * 2**20


def make_app(service: Service, model_name: str, metrics: ServeMetrics, access: Access) -> FastAPI:
    """Build the app. The caller starts and stops the service."""
    app = FastAPI(title="d3d", version=version("d3d-decoding"), docs_url=None, redoc_url=None)
    routes = _Routes(service, model_name, access)
    app.post("/v1/chat/completions")(routes.chat)
    app.post("/v1/completions")(routes.completions)
    app.get("/v1/models")(routes.models)
    app.get("/v1/models/{name:path}")(routes.one_model)
    app.post("/tokenize")(routes.tokenize)
    app.post("/detokenize")(routes.detokenize)
    app.get("/tokenizer_info")(routes.tokenizer_info)
    app.get("/health")(routes.health)
    app.get("/ready")(routes.ready)
    app.get("/version")(routes.version)

    async def figures() -> Response:
        return Response(metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    app.get("/metrics")(figures)
    app.add_middleware(_Guard, access=access)
    app.add_exception_handler(BadRequest, _bad_request)
    app.add_exception_handler(InvalidRequest, _invalid_request)
    app.add_exception_handler(D3DError, _server_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(Exception, _server_error)
    return app


class _Guard:
    """Checks the key, and logs each request without its text."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self._app, self._access = app, access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started, status = time.perf_counter(), 500

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        app = self._app if self._may_enter(scope) else _answered(_NO_KEY)
        hosts = self._access.hosts
        if hosts is not None and _host(scope) not in hosts:
            app = _answered(_WRONG_HOST)
        try:
            await app(scope, receive, watched)
        finally:
            entry = {
                "method": scope["method"],
                "path": scope["path"][:200],
                "status": status,
                "ms": round(1000 * (time.perf_counter() - started), 1),
            }
            LOG.info(to_json(entry))

    def _may_enter(self, scope: Scope) -> bool:
        key = self._access.api_key
        if key is None or scope["path"] in OPEN_PATHS:
            return True
        given = dict(scope["headers"]).get(b"authorization", b"")
        return hmac.compare_digest(given, f"Bearer {key}".encode())


def _host(scope: Scope) -> str:
    """Name by which the server was called, without its port."""
    given = str(dict(scope["headers"]).get(b"host", b"").decode("latin-1"))
    return re.sub(r":\d*$", "", given).strip("[]").lower()


_WRONG_HOST = BadRequest(
    "this server answers to the name of this machine's loopback address only, such as localhost",
    status=403,
    code="wrong_host",
)

_NO_KEY = BadRequest(
    "the API key is missing or wrong; send it as Authorization: Bearer KEY",
    status=401,
    code="invalid_api_key",
)


class _Routes:
    def __init__(self, service: Service, model_name: str, access: Access) -> None:
        self.service, self.model_name, self.access = service, model_name, access
        self.model = service.model
        self.created = int(time.time())
        # one thread: giant prompts in several would leave each thread's heap at its largest
        self._encoder = ThreadPoolExecutor(1, thread_name_prefix="d3d-encode")
        # one of its own: scores may take minutes, and must not hold up what else needs a thread
        self._scorer = ThreadPoolExecutor(1, thread_name_prefix="d3d-score")

    # Answers

    async def chat(self, request: Request) -> Response:
        body: ChatBody = parsed(ChatBody, await self._json(request))
        self._check_model(body.model)
        messages = [{"role": each.role, "content": each.text} for each in body.messages]
        token_ids = await self._encode(messages, thinking=body.thinking)
        return await self._answer(request, body, [token_ids], is_chat=True)

    async def completions(self, request: Request) -> Response:
        body: CompletionBody = parsed(CompletionBody, await self._json(request))
        self._check_model(body.model)
        prompts = body.prompts
        if not 1 <= len(prompts) <= MOST_PROMPTS:
            raise BadRequest(f"prompt: give 1 to {MOST_PROMPTS} prompts", param="prompt")
        encoded = [await self._encode(each, raw=isinstance(each, str)) for each in prompts]
        if body.echo:
            return await self._echo(request, body, encoded)
        return await self._answer(request, body, encoded, is_chat=False)

    async def _echo(
        self, request: Request, body: CompletionBody, prompts: list[list[int]]
    ) -> Response:
        """Answer with the prompts, and their log-probabilities if they are asked for."""
        form = self._form(body, prompts, is_chat=False)
        scores: list[list[TokenLogprob]] = [[] for _ in prompts]
        results: list[GenerationResult | None] = [None for _ in prompts]
        if body.logprobs is not None:
            scores = await unless_gone(request, self._scores(prompts, body.logprobs))
        if body.max_tokens != 0:
            jobs = await self._jobs(body, prompts)
            results = list(await unless_gone(request, whole_answers(jobs)))
        return JSONResponse(form.echoed(list(map(Echo, prompts, scores, results))))

    async def _scores(self, prompts: list[list[int]], num_top: int) -> list[list[TokenLogprob]]:
        return [
            await self._off_loop(
                self._scorer, partial(self.model.score, token_ids, num_top=num_top)
            )
            for token_ids in prompts
        ]

    async def _answer(
        self, request: Request, body: GenerationBody, prompts: list[list[int]], *, is_chat: bool
    ) -> Response:
        jobs = await self._jobs(body, prompts)
        form = self._form(body, prompts, is_chat=is_chat)
        num_prompt_tokens = sum(map(len, prompts))
        if body.stream:
            stream = events(jobs, form, num_prompt_tokens, includes_usage=body.includes_usage)
            return EventStream(jobs, stream)
        results = await unless_gone(request, whole_answers(jobs))
        return JSONResponse(form.whole(results, num_prompt_tokens))

    async def _jobs(self, body: GenerationBody, prompts: list[list[int]]) -> list[Job]:
        """Start all answers of a request."""
        asked = []
        for token_ids in prompts:
            room = max(1, self.model.max_length - len(token_ids))
            sampling = body.sampling(room)
            for number in range(body.num_choices):
                seed = None if body.seed is None else (body.seed + number) % 2**63
                asked.append((token_ids, {**sampling, "seed": seed}))
        loop = asyncio.get_running_loop()
        return await asyncio.to_thread(self.service.add, asked, loop)

    def _form(self, body: GenerationBody, prompts: list[list[int]], *, is_chat: bool) -> Form:
        return Form(
            self.model_name,
            is_chat,
            self.model.tokenizer,
            wants_ids=bool(body.return_token_ids),
            wants_logprobs=body.num_logprobs is not None,
            prompt_ids=[ids for ids in prompts for _ in range(body.num_choices)],
        )

    async def _encode(
        self, prompt: Prompt, *, raw: bool = False, thinking: bool | None = None
    ) -> list[int]:
        """Encode a prompt off the event loop. Raises InvalidRequest."""
        encode = partial(self.model.encode, prompt, raw=raw, thinking=thinking)
        return await self._off_loop(self._encoder, encode)

    @staticmethod
    async def _off_loop(executor: ThreadPoolExecutor, work: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(executor, work)

    # Models and tokens

    async def models(self) -> dict[str, Any]:
        return {"object": "list", "data": [self._model_entry()]}

    async def one_model(self, name: str) -> dict[str, Any]:
        self._check_model(name)
        return self._model_entry()

    def _model_entry(self) -> dict[str, Any]:
        return {
            "id": self.model_name,
            "object": "model",
            "created": self.created,
            "owned_by": "d3d",
            "max_model_len": self.model.max_length,
        }

    async def tokenize(self, request: Request) -> dict[str, Any]:
        body: TokenizeBody = parsed(TokenizeBody, await self._json(request))
        self._check_model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise BadRequest("prompt: give either a prompt or messages", param="prompt")
        if body.messages is not None:
            messages = [{"role": each.role, "content": each.text} for each in body.messages]
            tokens = await self._encode(messages)
        else:
            encode = partial(
                self.model.tokenizer.encode,
                body.prompt or "",
                add_special_tokens=body.add_special_tokens,
            )
            tokens = list(await self._off_loop(self._encoder, encode))
        return {
            "count": len(tokens),
            "max_model_len": self.model.max_length,
            "tokens": tokens,
        }

    async def detokenize(self, request: Request) -> dict[str, Any]:
        body: DetokenizeBody = parsed(DetokenizeBody, await self._json(request))
        self._check_model(body.model)
        size = len(self.model.tokenizer)
        for token_id in body.tokens:
            if not 0 <= token_id < size:
                raise BadRequest(
                    f"tokens: id {token_id} is not in the vocabulary (0 to {size - 1})",
                    param="tokens",
                )
        decode = partial(self.model.tokenizer.decode, body.tokens)
        return {"prompt": await self._off_loop(self._encoder, decode)}

    async def tokenizer_info(self) -> dict[str, Any]:
        tokenizer = self.model.tokenizer
        return {
            "tokenizer_class": type(tokenizer).__name__,
            "eos_token": tokenizer.eos_token,
            "bos_token": tokenizer.bos_token,
            "pad_token": tokenizer.pad_token,
            "chat_template": tokenizer.chat_template,
        }

    # State

    async def health(self) -> Response:
        return Response(status_code=200)

    async def ready(self) -> Response:
        return Response(status_code=200 if self.service.is_ready else 503)

    async def version(self) -> dict[str, str]:
        return {"version": version("d3d-decoding")}

    # Bodies

    async def _json(self, request: Request) -> Any:
        """Read a JSON body. Raises BadRequest."""
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":  # else any web page could post here without a preflight
            raise BadRequest(
                f"the content type is {kind or 'missing'}; send application/json", status=415
            )
        limit, parts, size = self.access.max_body_bytes, [], 0
        async for part in request.stream():
            size += len(part)
            if size > limit:
                raise BadRequest(f"the body is larger than {limit} bytes", status=413)
            parts.append(part)
        try:
            return json.loads(b"".join(parts).decode("utf-8"))
        except (ValueError, RecursionError) as error:
            raise BadRequest(f"the body is not JSON ({error})") from error

    def _check_model(self, name: str | None) -> None:
        if name is not None and name != self.model_name:
            raise BadRequest(
                f"model: there is no model {name[:200]!r} here, only {self.model_name!r}",
                param="model",
                status=404,
                code="model_not_found",
            )


# Errors


def _answered(error: BadRequest) -> JSONResponse:
    headers = {} if error.retry_after_s is None else {"Retry-After": str(error.retry_after_s)}
    return JSONResponse(error.body, status_code=error.status, headers=headers)


async def _bad_request(_: Request, error: Exception) -> Response:
    assert isinstance(error, BadRequest)
    return _answered(error)


_FIELDS = frozenset({*ChatBody.model_fields, *CompletionBody.model_fields})


async def _invalid_request(_: Request, error: Exception) -> Response:
    first = re.match(r"\w*", str(error))
    name = "" if first is None else first[0]
    param = name if name in _FIELDS else None
    too_long = "no room for an answer" in str(error)
    code = "context_length_exceeded" if too_long else None
    return _answered(BadRequest(str(error), param=param, code=code))


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    text = f"{request.method} {request.url.path[:200]}: {error.detail}"
    return _answered(BadRequest(text, status=error.status_code))


async def _server_error(_: Request, error: Exception) -> Response:
    LOG.error("a request failed", exc_info=error)
    text = f"{type(error).__name__}: {error}" if isinstance(error, D3DError) else "it failed"
    return _answered(BadRequest(text, status=500, kind="server_error"))
