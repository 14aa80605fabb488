"""Reading answers for HTTP: whole, or as server-sent events. Whoever leaves cancels them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Sequence
from typing import Any, TypeVar

from fastapi import Request
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from d3d.json_text import to_json
from d3d.results import GenerationResult, StreamChunk
from d3d.serve.answers import Form
from d3d.serve.protocol import BadRequest
from d3d.serve.service import AnswerFailed, Job

Answer = TypeVar("Answer")


async def whole_answers(jobs: Sequence[Job]) -> list[GenerationResult]:
    """Read all answers to their ends. Raises BadRequest if one ends early."""
    results = []
    try:
        for job in jobs:
            async for chunk in job.chunks():
                if chunk.result is not None:
                    results.append(chunk.result)
    except AnswerFailed as error:
        raise BadRequest(
            f"the answer ended early: {error}", status=500, kind="server_error"
        ) from error
    finally:
        for job in jobs:
            job.leave()
    return results


async def unless_gone(request: Request, answer: Awaitable[Answer]) -> Answer:
    """Wait for an answer, and cancel it if the client goes."""
    task = asyncio.ensure_future(answer)
    gone = asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise BadRequest("the client is gone", status=499)
        return task.result()
    finally:
        for each in (task, gone):
            each.cancel()
            with contextlib.suppress(asyncio.CancelledError, BadRequest):
                await each


async def _gone(request: Request) -> None:
    """Return when the client has closed its connection."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def events(
    jobs: Sequence[Job], form: Form, num_prompt_tokens: int, *, includes_usage: bool
) -> AsyncIterator[bytes]:
    """Server-sent events of a stream. An answer that ends early ends with an error event."""
    results: dict[int, GenerationResult] = {}
    for index in range(len(jobs)):
        if (opening := form.opening(index)) is not None:
            yield _event(opening)
    try:
        async for index, chunk in _merged(jobs):
            if chunk.result is not None:
                results[index] = chunk.result
            if (told := form.chunk(index, chunk)) is not None:
                yield _event(told)
    except AnswerFailed as error:
        yield _event(BadRequest(f"the answer ended early: {error}", kind="server_error").body)
        return
    if includes_usage:
        ordered = [results[index] for index in range(len(jobs))]
        yield _event(form.closing(ordered, num_prompt_tokens))
    yield b"data: [DONE]\n\n"


async def _merged(jobs: Sequence[Job]) -> AsyncIterator[tuple[int, StreamChunk]]:
    """Chunks of several answers as they come, with the answer's index. Raises AnswerFailed."""
    waiting: asyncio.Queue[tuple[int, StreamChunk | AnswerFailed]] = asyncio.Queue(maxsize=1)

    async def read(index: int, job: Job) -> None:
        try:
            async for chunk in job.chunks():
                await waiting.put((index, chunk))
        except AnswerFailed as error:
            await waiting.put((index, error))

    readers = [asyncio.ensure_future(read(index, job)) for index, job in enumerate(jobs)]
    num_open = len(jobs)
    try:
        while num_open:
            index, item = await waiting.get()
            if isinstance(item, AnswerFailed):
                raise item
            num_open -= item.result is not None
            yield index, item
    finally:
        for reader in readers:
            reader.cancel()


class EventStream(StreamingResponse):
    """Stream of answers that are cancelled when it ends, even if it never began."""

    def __init__(self, jobs: Sequence[Job], events: AsyncIterator[bytes]) -> None:
        super().__init__(
            events,
            media_type="text/event-stream",
            headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
        )
        self._jobs = jobs

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            for job in self._jobs:
                job.leave()


def _event(body: dict[str, Any]) -> bytes:
    return b"data: " + to_json(body, ensure_ascii=False).encode() + b"\n\n"
