"""A soak of the open set: a thousand requests come and go at random, with cancellations, drafter
faults and long prompts, and every answer is plain decoding's own."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest

from d3d.engine.drafter import Draft, Drafter, NoDrafter, Target
from d3d.engine.engine import Engine
from d3d.engine.request import Request, new_request
from d3d.engine.round import Round
from d3d.engine.sampling import SamplingParams
from d3d.methods.fused.engine import FusedTarget
from d3d.methods.ngram.drafter import NgramDrafter
from d3d.methods.serial.drafter import BlockDrafter
from d3d.model.transformer import Transformer
from d3d.target.native import NativeTarget
from support.drafters import text, tiny_drafter
from support.tiny import tiny_transformer

NUM_REQUESTS = 1000
PREFILL_ROWS = 24
MAX_BATCH = 20
WAYS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0, "seed": 3},
    {"frequency_penalty": 0.5},
    {"temperature": 0.8, "seed": 5, "top_k": 20},
]
PROMPTS = [
    *(text(length, seed=length) for length in (1, 2, 5, 9, 14)),
    [5, 17, 80] * 4,
    text(70, seed=4),  # several chunks
]
LIMITS = (1, 2, 4, 7, 12)
FAULT_EVERY = 23
"""One draft, or notice, of so many is spoilt."""


@cache
def base() -> Transformer:
    """Small, and apt to repeat itself, so that prompt lookup finds something."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2}
    sizes |= {"num_key_value_heads": 1, "head_dim": 16}
    return tiny_transformer(seed=1, scale=0.35, **sizes)


@cache
def plain_answer(prompt: int, way: int) -> tuple[int, ...]:
    """Decoded alone and without a drafter, as long as any; shorter ones are its beginning."""
    target = NativeTarget(base())
    params = SamplingParams(**WAYS[way], max_tokens=max(LIMITS))
    request = new_request(target, PROMPTS[prompt], params)
    for _ in Engine(target).run([request]):
        pass
    return tuple(request.answer_ids)


class Faults(Drafter):
    """Passes drafts on, but now and then raises, reports a fault, drafts ids that nobody knows, or
    too many."""

    def __init__(self, inner: Drafter, draw: random.Random) -> None:
        self.inner, self.draw = inner, draw
        self.max_draft_length = inner.max_draft_length
        self.told: dict[str, int] = {}
        self.inside: Callable[[], None] = lambda: None
        """What happens in the middle of a round."""

    def propose(self, requests: Sequence[Request]) -> list[Draft]:
        self.inside()
        drafts = self.inner.propose(requests)
        for place, draft in enumerate(drafts):
            if self.draw.randrange(FAULT_EVERY):
                continue
            kind = self.draw.choice(("raises", "fault", "foreign", "many"))
            self.told[kind] = self.told.get(kind, 0) + 1
            if kind == "raises":
                raise MemoryError("no room")
            drafts[place] = {
                "fault": Draft(fault="sneezed"),
                "foreign": draft._replace(token_ids=(97,)),
                "many": draft._replace(token_ids=(*draft.token_ids, *[7] * 30)),
            }[kind]
        return drafts

    def prefilled(self, seconds: float, num_tokens: int) -> None:
        self.inner.prefilled(seconds, num_tokens)

    def suspend(self, request: Request) -> None:
        self.inner.suspend(request)

    def observe(self, rounds: Sequence[Round]) -> None:
        self.inside()
        self.inner.observe(rounds)
        if not self.draw.randrange(FAULT_EVERY):
            raise ValueError("did not listen")

    def end(self, request: Request) -> None:
        self.inner.end(request)
        if not self.draw.randrange(FAULT_EVERY):
            raise ValueError("would not let go")

    @property
    def num_held(self) -> int:
        return self.inner.num_held


def plain(native: NativeTarget) -> tuple[Target, Drafter]:
    return native, NoDrafter()


def serial_beside(native: NativeTarget) -> tuple[Target, Drafter]:
    model = tiny_drafter(native.model)
    return native, BlockDrafter(model, 97, shared_cache=native.cache_for(model), lookup=4)


def serial_alone(native: NativeTarget) -> tuple[Target, Drafter]:
    model = tiny_drafter(native.model, scope="all")
    return native, BlockDrafter(model, 97, draft_length=4, least_kept=0.5)


def fused(native: NativeTarget) -> tuple[Target, Drafter]:
    engine = FusedTarget(native, tiny_drafter(native.model), 4, 8, lookup=4)
    return engine, engine


def ngram(native: NativeTarget) -> tuple[Target, Drafter]:
    return native, NgramDrafter(6)


@dataclass
class Visitor:
    """A request, and when it is to leave."""

    request: Request
    expected: tuple[int, ...]
    leaves: str
    """stays, waiting (before its first token), between (two rounds), inside (a round), after (its
    last)."""
    leaves_at: int
    """Committed tokens, from which on it is cancelled."""
    rounds: list[Round] = field(default_factory=list)
    was_cancelled: bool = False

    @property
    def is_due(self) -> bool:
        if self.leaves == "stays" or self.was_cancelled:
            return False
        if self.leaves == "after":
            return self.request.finished
        return self.request.num_answer_tokens >= self.leaves_at


def visitors(target: Target, draw: random.Random) -> list[Visitor]:
    """Few kinds of requests, so that plain decoding has little to do."""
    made = []
    for _ in range(NUM_REQUESTS):
        prompt, way = draw.randrange(len(PROMPTS)), draw.randrange(len(WAYS))
        limit = draw.choice(LIMITS)
        params = SamplingParams(**WAYS[way], max_tokens=limit)
        request = new_request(target, PROMPTS[prompt], params)
        leaves = draw.choices(("stays", "waiting", "between", "inside", "after"), (12, 2, 2, 2, 1))[
            0
        ]
        leaves_at = 0 if leaves == "waiting" else draw.randint(1, limit)
        made.append(Visitor(request, plain_answer(prompt, way)[:limit], leaves, leaves_at))
    return made


def check(visitor: Visitor) -> None:
    request = visitor.request
    answer = tuple(request.answer_ids)
    assert request.error is None
    assert answer == tuple(token for round_ in visitor.rounds for token in round_.token_ids)
    assert [round_.number for round_ in visitor.rounds] == list(range(len(visitor.rounds)))
    assert sum(round_.fault is not None for round_ in visitor.rounds) <= 1
    if request.finish_reason == "cancelled":
        assert visitor.was_cancelled
        assert answer == visitor.expected[: len(answer)]
        assert len(answer) < len(visitor.expected)
    else:
        assert request.finish_reason == "length"
        assert answer == visitor.expected


@pytest.mark.slow
@pytest.mark.parametrize("method", [plain, serial_beside, serial_alone, fused, ngram])
def test_a_thousand_requests_come_and_go(
    method: Callable[[NativeTarget], tuple[Target, Drafter]],
) -> None:
    draw = random.Random(method.__name__)
    native = NativeTarget(base())
    target, inner = method(native)
    drafter = Faults(inner, draw)
    engine = Engine(target, drafter, max_batch=MAX_BATCH, prefill_rows=PREFILL_ROWS)
    everybody = visitors(target, draw)
    by_id = {one.request.id: one for one in everybody}
    here: list[Visitor] = []

    def cancel(*ways: str) -> None:
        for one in here:
            if (
                one.leaves in ways
                and one.is_due
                and (one.leaves != "waiting" or draw.random() < 0.4)
            ):
                engine.cancel(one.request)
                one.was_cancelled = True

    drafter.inside = lambda: cancel("inside")
    coming = list(reversed(everybody))
    read_by_chunks = False
    while coming or engine.has_work:
        for _ in range(min(len(coming), draw.choice((0, 1, 3, 6, 12)))):
            here.append(coming.pop())
            engine.add(here[-1].request)
        cancel("waiting", "between", "after")
        for round_ in engine.step():
            by_id[round_.request_id].rounds.append(round_)
        read_by_chunks |= bool(engine.reading and engine.running)
        assert len(native.cache) <= MAX_BATCH
        here = [one for one in here if not one.request.finished or one.is_due]
    for one in everybody:
        check(one)
    assert target.num_held == inner.num_held == engine.drafter.num_held == 0
    assert native.cache.keys.numel() == 0, "the cache's memory is given back"
    assert read_by_chunks
    happened(everybody, drafter, drafts=inner.max_draft_length > 0)


def happened(everybody: list[Visitor], drafter: Faults, *, drafts: bool) -> None:
    """All that the soak is for has been there."""
    cancelled = [one for one in everybody if one.request.finish_reason == "cancelled"]
    assert {one.leaves for one in cancelled} == {"waiting", "between", "inside"}
    assert any(not one.rounds for one in cancelled)
    assert any(len(one.rounds) > 2 for one in cancelled)
    assert any(one.was_cancelled and one.leaves == "after" for one in everybody)
    rounds = [round_ for one in everybody for round_ in one.rounds]
    if drafts:
        assert set(drafter.told) == {"raises", "fault", "foreign", "many"}
        assert sum(round_.num_accepted for round_ in rounds) > 200
        assert any(0 < round_.num_accepted < round_.draft_length for round_ in rounds)
        assert sum(round_.fault is not None for round_ in rounds) > 10
