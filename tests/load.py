"""Load on a real server process: many clients with a mixed diet, every answer compared.

    python tests/load.py                       64 clients for two minutes, a tiny model
    python tests/load.py --clients 16 --seconds 20

Clients ask whole and streamed, greedy and seeded, leave in the midst of a stream, send giant
prompts and bad JSON, and read slowly. It fails if an answer differs from the engine's own, a status
is not one of those expected, a request stays in the tables, or memory grows in the second half.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from statistics import median
from typing import Any

import httpx2

sys.path.insert(0, str(Path(__file__).parent))

import d3d
from support.server import RunningServer, serving
from support.tiny_model import write_tiny_drafter, write_tiny_target

QUESTIONS = [f"how much is {number} and two?" for number in range(12)]
SAMPLINGS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0.8, "seed": 7},
    {"temperature": 0, "presence_penalty": 0.5, "stop": ["zz"]},
]
MAX_TOKENS = 40
EXPECTED = frozenset({200, 400, 413, 429, 503})


class Load:
    """Clients of one run, and what they met."""

    def __init__(self, server: RunningServer, answers: dict[tuple[int, int], str]) -> None:
        self._server, self._answers = server, answers
        self.counts: Counter[str] = Counter()
        self.problems: list[str] = []

    async def run(self, num_clients: int, seconds: float) -> list[float]:
        """Ask until the time is over; returns samples of the server's memory in MiB."""
        until = time.monotonic() + seconds
        memory: list[float] = []
        limits = httpx2.Limits(max_connections=num_clients + 8)
        async with httpx2.AsyncClient(
            base_url=self._server.url, timeout=120, limits=limits
        ) as client:
            tasks = [
                asyncio.ensure_future(self._client(client, random.Random(seed), until))
                for seed in range(num_clients)
            ]
            while time.monotonic() < until:
                memory.append(self._server.memory_bytes / 2**20)
                await asyncio.sleep(1)
            await asyncio.gather(*tasks)
        return memory

    async def _client(self, client: httpx2.AsyncClient, rng: random.Random, until: float) -> None:
        kinds = [self._whole, self._stream, self._leave, self._slow, self._bad, self._giant]
        while time.monotonic() < until:
            (kind,) = rng.choices(kinds, weights=[5, 5, 2, 1, 1, 1])
            try:
                await kind(client, rng)
            except Exception as error:  # a finding, whatever it is
                self.problems.append(f"{kind.__name__}: {type(error).__name__}: {error}")

    def _asked(self, rng: random.Random) -> tuple[tuple[int, int], dict[str, Any]]:
        key = (rng.randrange(len(QUESTIONS)), rng.randrange(len(SAMPLINGS)))
        messages = [{"role": "user", "content": QUESTIONS[key[0]]}]
        return key, {"messages": messages, "max_tokens": MAX_TOKENS, **SAMPLINGS[key[1]]}

    async def _whole(self, client: httpx2.AsyncClient, rng: random.Random) -> None:
        key, body = self._asked(rng)
        answer = await client.post("/v1/chat/completions", json=body)
        if self._is_served("whole", answer.status_code):
            self._compare(key, answer.json()["choices"][0]["message"]["content"])
        else:
            await asyncio.sleep(rng.random())

    async def _stream(
        self, client: httpx2.AsyncClient, rng: random.Random, pause_s: float = 0.0
    ) -> None:
        key, body = self._asked(rng)
        async with client.stream(
            "POST", "/v1/chat/completions", json=body | {"stream": True}
        ) as answer:
            if not self._is_served("stream", answer.status_code):
                return
            events = []
            async for line in answer.aiter_lines():
                events += [line.removeprefix("data: ")] if line else []
                await asyncio.sleep(pause_s)
        if events[-1] != "[DONE]":
            self.problems.append(f"a stream ended with {events[-1][:200]}")
            return
        deltas = [json.loads(event)["choices"][0]["delta"] for event in events[:-1]]
        self._compare(key, "".join(delta.get("content", "") for delta in deltas))

    async def _slow(self, client: httpx2.AsyncClient, rng: random.Random) -> None:
        await self._stream(client, rng, pause_s=0.1)

    async def _leave(self, client: httpx2.AsyncClient, rng: random.Random) -> None:
        _, body = self._asked(rng)
        body |= {"stream": True, "max_tokens": 200, "ignore_eos": True, "n": rng.randint(1, 3)}
        async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
            if self._is_served("leave", answer.status_code):
                async for _ in answer.aiter_lines():
                    if rng.random() < 0.3:
                        return

    async def _bad(self, client: httpx2.AsyncClient, rng: random.Random) -> None:
        content = rng.choice([b"{", b"[]", b'{"messages": 5}', b"\xff", b'{"messages": [NaN]}'])
        headers = {"content-type": "application/json"}
        answer = await client.post("/v1/chat/completions", content=content, headers=headers)
        self._is_served("bad", answer.status_code)
        if answer.status_code != 400:
            self.problems.append(f"{content!r} got status {answer.status_code}")

    async def _giant(self, client: httpx2.AsyncClient, rng: random.Random) -> None:
        _, body = self._asked(rng)
        body["messages"][0]["content"] *= rng.choice([200, 20_000])
        answer = await client.post("/v1/chat/completions", json=body)
        self._is_served("giant", answer.status_code)

    def _is_served(self, kind: str, status: int) -> bool:
        self.counts[f"{kind} {status}"] += 1
        if status not in EXPECTED:
            self.problems.append(f"{kind}: status {status}")
        return status == 200

    def _compare(self, key: tuple[int, int], text: str) -> None:
        self.counts["compared"] += 1
        if text != self._answers[key]:
            self.problems.append(f"{QUESTIONS[key[0]]} {SAMPLINGS[key[1]]}: {text!r}")


def own_answers(target: Path) -> dict[tuple[int, int], str]:
    """The engine's own answers, decoded plainly and alone."""
    with d3d.load(str(target), device="cpu", dtype="float32") as model:
        return {
            (question, sampling): model.generate(
                QUESTIONS[question], max_tokens=MAX_TOKENS, **SAMPLINGS[sampling]
            ).text
            for question in range(len(QUESTIONS))
            for sampling in range(len(SAMPLINGS))
        }


def open_requests(url: str) -> float:
    lines = httpx2.get(f"{url}/metrics").text.splitlines()
    names = ("vllm:num_requests_running{", "vllm:num_requests_waiting{")
    return sum(float(line.split()[-1]) for line in lines if line.startswith(names))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=120.0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        target = write_tiny_target(Path(directory) / "target")
        drafter = write_tiny_drafter(Path(directory) / "drafter", target)
        answers = own_answers(target)
        with serving(
            Path(directory) / "log",
            *("--model", target, "--drafter", drafter, "--dtype", "float32", "--device", "cpu"),
        ) as server:
            load = Load(server, answers)
            memory = asyncio.run(load.run(arguments.clients, arguments.seconds))
            limit = time.monotonic() + 20
            while open_requests(server.url) and time.monotonic() < limit:
                time.sleep(0.1)
            if left := open_requests(server.url):
                load.problems.append(f"{left:.0f} requests are still in the tables")
            if "Traceback" in (log := server.log.read_text()):
                load.problems.append(log[log.index("Traceback") :][:3000])
    quarter = max(1, len(memory) // 4)
    third, last = median(memory[2 * quarter : 3 * quarter] or memory), median(memory[-quarter:])
    if last > 1.05 * third + 16:
        load.problems.append(f"memory grew: {memory}")
    print(dict(sorted(load.counts.items())))
    print(f"memory, MiB: first {memory[0]:.0f}, third quarter {third:.0f}, last {last:.0f}")
    for problem in load.problems[:20]:
        print(f"problem: {problem}", file=sys.stderr)
    print(f"{len(load.problems)} problems")
    return bool(load.problems)


if __name__ == "__main__":
    sys.exit(main())
