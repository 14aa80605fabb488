"""The server's threads, without a network."""

from __future__ import annotations

import asyncio
import json
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from fastapi import Request

import d3d
from d3d.engine.round import TokenLogprob
from d3d.serve.answers import Form
from d3d.serve.app import Access, _Routes
from d3d.serve.protocol import BadRequest
from d3d.serve.run import DrainingServer
from d3d.serve.service import AnswerFailed, Job, Service


class Piece(str):
    """Text that counts how often its length is asked for."""

    asked = 0

    def __len__(self) -> int:
        Piece.asked += 1
        return super().__len__()

    def __str__(self) -> str:
        return self


class Pieces:
    """Tokenizer that tells the threads that it worked in."""

    def __init__(self) -> None:
        self.threads: set[str] = set()

    def __len__(self) -> int:
        return 10

    def decode(self, token_ids: list[int]) -> str:
        self.threads.add(threading.current_thread().name)
        return Piece("ab" * len(token_ids))

    def encode(self, text: str, **_: Any) -> list[int]:
        self.threads.add(threading.current_thread().name)
        return [len(text)]


def test_text_offsets_take_time_linear_in_the_answer() -> None:
    form: Any = Form("m", False, Pieces(), wants_logprobs=True)  # type: ignore[arg-type]
    Piece.asked = 0
    table = form._logprobs([TokenLogprob(1, -0.5, ())] * 100)
    assert table["text_offset"] == list(range(0, 200, 2))
    assert Piece.asked <= 100
    assert form._logprobs([])["text_offset"] == []


def test_a_signal_takes_no_lock_in_its_handler() -> None:
    told: list[bool] = []

    async def app(scope: object, receive: object, send: object) -> None: ...

    server = DrainingServer(uvicorn.Config(app, lifespan="off"), lambda: told.append(True))
    server.handle_exit(signal.SIGTERM, None)
    assert server.should_exit
    assert not told
    server.config.load()
    server.lifespan = server.config.lifespan_class(server.config)
    server.servers = []
    asyncio.run(server.shutdown())
    assert told


def test_answers_end_when_the_engines_thread_does(tiny_target: Path) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("a defect")

    model = d3d.load(str(tiny_target), device="cpu", dtype="float32")
    service = Service(model, {}, observe=broken)

    async def ask() -> None:
        service.start()
        asked = [([5, 6, 7], {"max_tokens": 50, "ignore_eos": True})]
        (job,) = service.add(asked, asyncio.get_running_loop())
        with pytest.raises(AnswerFailed):
            async for _ in job.chunks():
                pass
        with pytest.raises(BadRequest):
            service.add(asked, asyncio.get_running_loop())

    threading.excepthook, former = lambda _: None, threading.excepthook
    try:
        asyncio.run(asyncio.wait_for(ask(), 20))
    finally:
        threading.excepthook = former
        service.stop()


def test_long_work_stays_off_the_event_loop() -> None:
    class Scorer:
        tokenizer, max_length = Pieces(), 10

        def encode(self, prompt: list[int], **_: object) -> list[int]:
            return prompt

        def score(self, *_: object, **__: object) -> list[TokenLogprob]:
            self.tokenizer.threads.add(threading.current_thread().name)
            return [TokenLogprob(1, -0.5, ())]

    class Stub:
        model = Scorer()

    def request(body: dict[str, Any]) -> Request:
        messages = [{"type": "http.request", "body": json.dumps(body).encode()}]

        async def receive() -> dict[str, Any]:
            if not messages:
                await asyncio.sleep(60)
            return messages.pop()

        headers = [(b"content-type", b"application/json")]
        return Request({"type": "http", "method": "POST", "headers": headers}, receive)

    async def ask() -> None:
        routes = _Routes(Stub(), "m", Access())  # type: ignore[arg-type]
        assert await routes.tokenize(request({"prompt": "abc"})) == {
            "count": 1,
            "max_model_len": 10,
            "tokens": [3],
        }
        assert (await routes.detokenize(request({"tokens": [1]})))["prompt"] == "ab"
        told = {name.partition("_")[0] for name in Stub.model.tokenizer.threads}
        assert told == {"d3d-encode"}
        Stub.model.tokenizer.threads.clear()
        body = {"prompt": [1, 2], "echo": True, "max_tokens": 0, "logprobs": 1}
        await routes.completions(request(body))
        # a thread of its own: requests that only join the engine never wait for scores
        assert "d3d-score_0" in Stub.model.tokenizer.threads

    asyncio.run(ask())


def test_an_answer_is_counted_before_it_is_read(tiny_target: Path) -> None:
    model = d3d.load(str(tiny_target), device="cpu", dtype="float32")

    async def ask() -> None:
        told: list[str] = []

        class Watched(Job):
            def _put(self, item: Any) -> None:
                told.append("read")

        handle = model.add([5, 6, 7], max_tokens=1)
        model.step()
        Watched(handle, asyncio.get_running_loop(), print).collect(
            lambda *_: told.append("counted")
        )
        assert told == ["counted", "read"]

    asyncio.run(ask())
