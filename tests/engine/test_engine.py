"""The engine's request set: requests join at any round, leave at any moment, and a failing target
or drafter affects only the requests in that pass."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from d3d.engine.drafter import NO_DRAFT, Draft, Drafter, NoDrafter, Target, guarded
from d3d.engine.engine import Engine
from d3d.engine.request import Request, new_request
from d3d.engine.round import Round, RoundTimes
from d3d.engine.sampling import LogitRows, SamplingParams, TokenCounts, Verdict
from d3d.errors import InvalidRequest
from d3d.target.native import NativeTarget
from support.doubles import Double, failing, faulty, oracle
from support.drafters import text
from support.runs import PROMPT, Run, Watched, make, run, run_all

TIMES = RoundTimes(5.0, 0.25, 0.5, (5.5, 5.75))


@pytest.fixture
def target(target: NativeTarget) -> NativeTarget:
    """One that holds nothing yet, whatever a test before has left."""
    return NativeTarget(target.model)


# A request


def test_commit_extends_the_answer_and_tells_what_the_round_was() -> None:
    request = Request(PROMPT, SamplingParams(max_tokens=20))
    first = request.commit(NO_DRAFT, Verdict((), 7), RoundTimes(4.0, 0.0, 0.1))
    assert (first.number, first.draft_length, first.token_ids) == (0, 0, (7,))
    draft = Draft((8, 9, 3), looked_up=True, num_slots=4)
    round_ = request.commit(draft, Verdict((8, 9), 1), TIMES)
    assert round_ == Round(
        draft_length=3,
        num_accepted=2,
        num_committed=3,
        t_draft=0.25,
        t_verify=0.5,
        started=5.0,
        device_span=(5.5, 5.75),
        looked_up=True,
        num_slots=4,
        request_id=request.id,
        number=1,
        token_ids=(8, 9, 1),
    )
    assert request.token_ids == [*PROMPT, 7, 8, 9, 1]
    assert (request.answer_ids, request.num_answer_tokens) == ([7, 8, 9, 1], 4)
    assert (request.anchor, len(request), request.num_rounds) == (1, 9, 2)
    assert not request.finished
    faulty_round = request.commit(Draft(fault="broken"), Verdict((), 2), TIMES)
    assert (faulty_round.fault, faulty_round.number) == ("broken", 2)


@pytest.mark.parametrize(
    ("accepted", "bonus", "committed", "num_accepted", "reason"),
    [
        ((1, 2), 3, (1, 2, 3), 2, None),
        ((1, 60), 3, (1, 60), 2, "stop"),
        ((60, 1), 3, (60,), 1, "stop"),
        ((1, 2), 60, (1, 2, 60), 2, "stop"),
        ((1, 2, 3, 4), 5, (1, 2, 3, 4), 4, "length"),
        ((1, 2, 3), 4, (1, 2, 3, 4), 3, "length"),
        ((1, 2, 3, 60), 5, (1, 2, 3, 60), 4, "stop"),
    ],
)
def test_commit_ends_where_a_stop_ends_it(
    accepted: tuple[int, ...],
    bonus: int,
    committed: tuple[int, ...],
    num_accepted: int,
    reason: Any,
) -> None:
    params = SamplingParams(max_tokens=4, frequency_penalty=0.5)
    request = Request(PROMPT, params, eos_token_ids=frozenset({60}))
    request.counts = TokenCounts(PROMPT, 97, torch.device("cpu"))
    round_ = request.commit(Draft(accepted), Verdict(accepted, bonus), TIMES)
    assert (round_.token_ids, round_.num_accepted) == (committed, num_accepted)
    assert (round_.num_committed, round_.draft_length) == (len(committed), len(accepted))
    assert round_.finish_reason == request.finish_reason == reason
    assert request.finished == (reason is not None)
    assert request.answer_ids == list(committed)
    assert request.counts.answer.nonzero()[:, 0].tolist() == sorted(committed)


def test_ids_are_unique_and_there_is_room_for_a_draft_but_for_the_last_token() -> None:
    first, second = Request(PROMPT, SamplingParams(max_tokens=6)), Request(PROMPT)
    assert first.id != second.id
    assert [first.draft_room(most) for most in (0, 3, 5, 9)] == [0, 3, 5, 5]
    assert first.scanner.limit == 6
    first.commit(NO_DRAFT, Verdict((1, 2, 3), 4), TIMES)
    assert first.draft_room(9) == 1
    first.commit(NO_DRAFT, Verdict((), 5), TIMES)
    assert first.draft_room(9) == 0
    short = Request(PROMPT, SamplingParams(max_tokens=6), max_length=len(PROMPT) + 2)
    assert (short.scanner.limit, short.draft_room(9)) == (2, 1)


def test_impossible_requests_are_refused(target: NativeTarget) -> None:
    for prompt, message in (
        ([], "prompt: it is empty"),
        ([1, 97], "token id 97 is not in the target's vocabulary"),
        ([-1, 3], "token id -1 is not"),
        ([1] * 512, "512 tokens leave no room"),
    ):
        with pytest.raises(InvalidRequest, match=message):
            new_request(target, prompt, SamplingParams())
    with pytest.raises(InvalidRequest, match="stop_token_ids: token id 97"):
        new_request(target, [1], SamplingParams(stop_token_ids=(97,)))
    penalised = new_request(target, [1, 1], SamplingParams(presence_penalty=1.0))
    assert penalised.counts is not None
    assert penalised.counts.prompt.tolist()[:2] == [0, 2]
    assert new_request(target, [1], SamplingParams()).counts is None


# Joining and leaving


def requests(target: Target, count: int, **params: Any) -> list[Request]:
    return [make(target, text(4 + i, seed=i), **params).request for i in range(count)]


def plain(target: Target, request: Request) -> list[int]:
    """The answer that it would have alone."""
    prompt = request.token_ids[: request.prompt_length]
    other = Request(prompt, request.params, seed=request.seed, max_length=target.max_length)
    other.counts = request.counts
    assert request.counts is None
    for _ in Engine(target).run([other]):
        pass
    return other.answer_ids


def finish(engine: Engine) -> list[Round]:
    rounds = []
    while engine.has_work:
        rounds += engine.step()
    return rounds


@pytest.mark.parametrize("at_round", range(12))
def test_a_request_joins_at_any_round(target: NativeTarget, at_round: int) -> None:
    early = requests(target, 3, max_tokens=9)
    (late,) = requests(target, 1, max_tokens=12, temperature=1.0, seed=5)
    drafter = oracle(3, [])
    engine = Engine(target, drafter)
    for request in early:
        engine.add(request)
    for _ in range(at_round):
        engine.step()
    engine.add(late)
    rounds = finish(engine)
    for request in (*early, late):
        assert request.answer_ids == plain(target, request)
    told = [round_.number for round_ in rounds if round_.request_id == late.id]
    assert told == list(range(12))
    assert target.num_held == drafter.num_held == 0


def test_a_request_may_join_an_engine_that_has_gone_idle(target: NativeTarget) -> None:
    engine = Engine(target)
    assert engine.step() == []
    assert not engine.has_work
    for request in requests(target, 2, max_tokens=4):
        engine.add(request)
        assert engine.has_work
        finish(engine)
        assert request.answer_ids == plain(target, request)
        assert target.cache.keys.numel() == 0, "the last to leave gives the memory back"


@pytest.mark.parametrize("when", ["waiting", "no room", "reading", "running", "last round"])
def test_a_cancelled_request_leaves_before_the_next_step(target: NativeTarget, when: str) -> None:
    one, other = requests(target, 2, max_tokens=6)
    drafter = oracle(2, [])
    engine = Engine(target, drafter, max_batch=1 if when == "no room" else None, prefill_rows=4)
    if when == "no room":
        engine.add(other)
    engine.add(one)
    if when != "no room":
        engine.add(other)
    steps = {"waiting": 0, "no room": 2, "reading": 1, "running": 3, "last round": 5}[when]
    if when == "reading":  # behind the other, whose four tokens fill the first step
        engine = Engine(target, drafter, prefill_rows=4)
        engine.add(one)
        one, other = other, one
        engine.add(one)
    for _ in range(steps):
        engine.step()
    if when == "reading":
        engine.step()
        assert one in engine.reading
        assert one.id in target.cache
    before = one.answer_ids
    engine.cancel(one)
    engine.cancel(one)
    assert not one.finished
    rounds = finish(engine)
    assert one.finish_reason == "cancelled"
    assert one.answer_ids == before
    assert not any(round_.request_id == one.id for round_ in rounds)
    assert other.finish_reason == "length"
    assert other.answer_ids == plain(target, other)
    assert (bool(before), when in ("running", "last round")) in ((True, True), (False, False))
    assert target.num_held == drafter.num_held == engine.drafter.num_held == 0


def test_what_a_round_has_committed_while_it_was_cancelled_stays(target: NativeTarget) -> None:
    one, other = requests(target, 2, max_tokens=8)
    engine: Engine

    def propose(request: Request, length: int, number: int) -> Draft:
        if number == 2 and request is one:
            engine.cancel(one)  # in the middle of a round, as another thread may
        return NO_DRAFT

    engine = Engine(target, Double(4, propose))
    engine.add(one)
    engine.add(other)
    rounds = finish(engine)
    assert one.finish_reason == "cancelled"
    assert one.answer_ids == plain(target, one)[:4], "the first token and three rounds"
    assert [r.number for r in rounds if r.request_id == one.id] == [0, 1, 2, 3]
    assert other.answer_ids == plain(target, other)
    assert target.num_held == engine.drafter.num_held == 0


def test_cancelling_what_has_ended_or_never_began_changes_nothing(target: NativeTarget) -> None:
    ended, unknown, twice = requests(target, 3, max_tokens=3)
    engine = Engine(target)
    engine.add(ended)
    finish(engine)
    engine.cancel(ended)
    engine.cancel(unknown)
    finish(engine)
    assert (ended.finish_reason, unknown.finish_reason) == ("length", "cancelled")
    engine.add(unknown)  # too late
    engine.add(twice)
    finish(engine)
    assert unknown.answer_ids == []
    assert twice.answer_ids == plain(target, twice)
    assert not engine.has_work


def test_one_may_be_cancelled_in_the_round_that_ends_it(target: NativeTarget) -> None:
    (one,) = requests(target, 1, max_tokens=3)
    engine = Engine(target, Double(4, lambda *_: engine.cancel(one) or NO_DRAFT))  # type: ignore
    engine.add(one)
    finish(engine)
    assert one.finish_reason == "cancelled"
    (one,) = requests(target, 1, max_tokens=3)

    def propose(request: Request, length: int, number: int) -> Draft:
        engine.cancel(one)
        return Draft(tuple(plain(NativeTarget(target.model), one)[1:]))

    engine = Engine(target, Double(4, propose))
    engine.add(one)
    finish(engine)
    assert one.finish_reason == "length", "it had ended before it could leave"


def test_run_stops_early_and_leaves_nothing_behind(target: NativeTarget) -> None:
    drafter = oracle(2, [])
    engine = Engine(target, drafter, max_batch=2)
    three = requests(target, 3, max_tokens=30)
    stream = engine.run(three)
    for _ in range(7):
        next(stream)
    stream.close()
    assert [request.finish_reason for request in three] == ["cancelled"] * 3
    assert [bool(request.answer_ids) for request in three] == [True, True, False]
    assert target.num_held == engine.drafter.num_held == 0
    assert not engine.has_work


def test_add_and_cancel_from_other_threads(target: NativeTarget) -> None:
    engine = Engine(target, max_batch=4)
    everybody: list[list[Request]] = [requests(target, 60, max_tokens=2) for _ in range(4)]
    cancelled = {request.id for part in everybody for request in part[::3]}
    done = threading.Event()

    def bring(part: list[Request]) -> None:
        for request in part:
            engine.add(request)
            if request.id in cancelled:
                engine.cancel(request)

    threads = [threading.Thread(target=bring, args=(part,)) for part in everybody]

    def watch() -> None:
        for thread in threads:
            thread.join()
        done.set()

    for thread in threads:
        thread.start()
    threading.Thread(target=watch).start()
    while not done.is_set() or engine.has_work:
        engine.step()
    for request in (request for part in everybody for request in part):
        if request.id in cancelled:
            assert request.finish_reason in ("cancelled", "length")
        else:
            assert (request.finish_reason, len(request.answer_ids)) == ("length", 2)
    assert target.num_held == 0


# Prompts


class CountedTarget(Watched):
    """Notes how many prompt tokens each step has read."""

    def __init__(self, target: NativeTarget) -> None:
        super().__init__(target)
        self.read: list[int] = []

    def prefill(self, requests: Sequence[Request], num_rows: int) -> list[LogitRows | None]:
        inner = self.inner
        assert isinstance(inner, NativeTarget)

        def held() -> int:
            ids = [request.id for request in requests if request.id in inner.cache]
            return sum(inner.cache.length(request_id) for request_id in ids)

        before = held()
        rows = super().prefill(requests, num_rows)
        self.read.append(held() - before)
        return rows


@pytest.mark.parametrize("prefill_rows", [1, 3, 8, 100])
def test_prompts_are_read_in_chunks_while_others_go_on(
    target: NativeTarget, prefill_rows: int
) -> None:
    counted = CountedTarget(target)
    engine = Engine(counted, prefill_rows=prefill_rows)
    going = make(target, [5, 6, 7], max_tokens=60).request
    engine.add(going)
    while not going.num_rounds:
        engine.step()
    long, short = (make(target, text(n, seed=n), max_tokens=4).request for n in (50, 2))
    engine.add(long)
    engine.add(short)
    counted.read.clear()
    steps = 0
    while not short.num_rounds:
        rounds = engine.step()
        assert going.id in {round_.request_id for round_ in rounds}, "nobody is held up"
        steps += 1
    assert max(counted.read) == min(prefill_rows, 52), "as many rows as there may be"
    assert sum(counted.read) == 52
    assert steps == -(-52 // prefill_rows)
    finish(engine)
    for request in (going, long, short):
        assert request.answer_ids == plain(target, request)


@pytest.mark.parametrize("prefill_rows", [1, 2, 7, 512])
def test_chunks_change_no_answer(target: NativeTarget, prefill_rows: int) -> None:
    params = {"temperature": 1.0, "seed": 3, "max_tokens": 12}
    prompts = [text(n, seed=n) for n in (30, 1, 13)]
    expected = [run(target, prompt=prompt, **params).ids for prompt in prompts]
    runs = [make(target, prompt, **params) for prompt in prompts]
    run_all(target, oracle(3, []), runs, prefill_rows=prefill_rows)
    assert [one.ids for one in runs] == expected


def test_the_time_of_all_its_chunks_is_told_with_the_last(target: NativeTarget) -> None:
    told: list[tuple[float, int]] = []

    class Listening(NoDrafter):
        def prefilled(self, seconds: float, num_tokens: int) -> None:
            told.append((seconds, num_tokens))

    engine = Engine(target, Listening(), prefill_rows=5)
    one, two = (make(target, text(n), max_tokens=2).request for n in (11, 2))
    engine.add(one)
    engine.add(two)
    rounds = finish(engine)
    firsts = {round_.request_id: round_ for round_ in rounds if not round_.number}
    assert [num_tokens for _, num_tokens in told] == [13]
    assert told[0][0] > firsts[one.id].t_verify > 0, "three chunks took longer than the last"


@pytest.mark.parametrize("max_batch", [1, 2, 5])
def test_never_more_than_max_batch(target: NativeTarget, max_batch: int) -> None:
    watched = Watched(target)
    engine = Engine(watched, max_batch=max_batch, prefill_rows=30)
    everybody = requests(target, 9, max_tokens=5)
    for request in everybody:
        engine.add(request)
    while engine.has_work:
        engine.step()
        assert len(engine.running) + len(engine.reading) <= max_batch
        assert target.num_held <= max_batch
    assert max(map(len, watched.fed)) == max_batch
    assert [r.answer_ids for r in everybody] == [plain(target, r) for r in everybody]


# Targets that fail


class FailingTarget(Watched):
    """Raises in the calls that it is told."""

    def __init__(self, target: Target, where: str, at_call: int, *, last: bool = False) -> None:
        super().__init__(target)
        self.where, self.at_call, self.last = where, at_call, last
        self.calls = dict.fromkeys(("prefill", "verify", "rewind"), 0)

    def _count(self, where: str) -> None:
        self.calls[where] += 1
        if where == self.where and self.calls[where] == self.at_call:
            raise RuntimeError("out of memory")

    def prefill(self, requests: Sequence[Request], num_rows: int) -> list[LogitRows | None]:
        if not self.last:
            self._count("prefill")
        rows = super().prefill(requests, num_rows)
        if self.last:  # after the cache has grown
            self._count("prefill")
        return rows

    def verify(self, requests: Sequence[Request], drafts: Sequence[Draft]) -> list[LogitRows]:
        if not self.last:
            self._count("verify")
        rows = super().verify(requests, drafts)
        if self.last:
            self._count("verify")
        return rows

    def rewind(self, requests: Sequence[Request]) -> None:
        self._count("rewind")
        super().rewind(requests)


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize(("where", "at_call"), [("prefill", 2), ("verify", 2), ("rewind", 2)])
def test_a_target_that_raises_fails_those_that_it_raised_for(
    target: NativeTarget, where: str, at_call: int, last: bool
) -> None:
    broken = FailingTarget(target, where, at_call, last=last)
    drafter = oracle(3, [])
    engine = Engine(broken, drafter, prefill_rows=8)
    running, reading, waiting = requests(target, 3, max_tokens=7)
    engine.add(running)
    engine.step()
    engine.add(reading)
    engine.step()
    engine.add(waiting)
    finish(engine)
    if where == "prefill":
        failed, well = [reading], [running, waiting]
    else:  # the second had joined by then
        failed, well = [running, reading], [waiting]
    for request in failed:
        assert isinstance(request.error, RuntimeError)
        assert request.finish_reason is None
        assert request.finished
        assert request.answer_ids == plain(target, request)[: len(request.answer_ids)]
    for request in well:
        assert request.error is None
        assert request.answer_ids == plain(target, request)
    assert sorted(broken.ended) == sorted(r.id for r in (running, reading, waiting))
    assert target.num_held == drafter.num_held == engine.drafter.num_held == 0


def test_run_raises_what_a_request_failed_of(target: NativeTarget) -> None:
    broken = FailingTarget(target, "verify", 3)
    two = requests(target, 2, max_tokens=9)
    with pytest.raises(RuntimeError, match="out of memory"):
        list(Engine(broken).run(two))
    assert target.num_held == 0
    assert [len(request.answer_ids) for request in two] == [3, 3]


def test_an_acceptance_rule_that_raises_is_the_same(target: NativeTarget) -> None:
    one, other = requests(target, 2, max_tokens=4)
    other.params = SamplingParams(max_tokens=4, presence_penalty=1.0)  # and no counts
    engine = Engine(target)
    engine.add(one)
    engine.step()
    engine.add(other)
    finish(engine)
    assert isinstance(other.error, ValueError)
    assert "counts" in str(other.error)
    assert one.finish_reason == "length"


# Drafters that fail: `guarded`


def at_work(target: NativeTarget, drafter: Drafter, count: int = 3) -> list[Run]:
    runs = [make(target, text(4 + i, seed=i), max_tokens=12) for i in range(count)]
    return run_all(target, drafter, runs)


FOREIGN = "outside of the target's vocabulary of 97"


@pytest.mark.parametrize(
    ("spoil", "fault"),
    [
        (
            lambda draft: Draft((97, *draft.token_ids[1:])),
            "outside of the target's vocabulary of 97",
        ),
        (
            lambda draft: Draft((*draft.token_ids[:1], -1)),
            "outside of the target's vocabulary of 97",
        ),
        (lambda draft: Draft(fault="broken"), "broken"),
    ],
    ids=["foreign id", "negative id", "fault"],
)
def test_a_spoilt_request_goes_on_plainly_while_others_draft(
    target: NativeTarget, spoil: Any, fault: str
) -> None:
    expected = at_work(target, NoDrafter())
    right = oracle(2, [one.token_ids for one in expected])
    spoilt_id, asked, suspended = expected[1].request.prompt_length, [], []

    class Spoiling(Double):
        def suspend(self, request: Request) -> None:
            suspended.append(request.prompt_length)

    def propose(request: Request, length: int, number: int) -> Draft:
        asked.append((number, request.prompt_length))
        draft = right.make_draft(request, length, number)
        return spoil(draft) if number == 1 and request.prompt_length == spoilt_id else draft

    together = at_work(target, Spoiling(2, propose))
    assert [one.ids for one in together] == [one.ids for one in expected]
    assert [len(one.faults) for one in together] == [0, 1, 0]
    assert fault in together[1].faults[0]
    assert [round_.fault is not None for round_ in together[1].rounds[:3]] == [False, True, False]
    assert [round_.draft_length for round_ in together[1].rounds][:4] == [2, 0, 0, 0]
    assert [number for number, length in asked if length == spoilt_id] == [0, 1]
    assert suspended == [spoilt_id], "it may drop what it can't go on from"
    for one in (together[0], together[2]):
        assert all(round_.num_accepted == 2 for round_ in one.rounds[:-1])


def test_a_drafter_that_raises_is_not_asked_for_these_requests_again_but_for_others(
    target: NativeTarget,
) -> None:
    expected = at_work(target, NoDrafter())
    inner = failing(oracle(2, [one.token_ids for one in expected]), at_draft=1)
    inner.num_drafts = 0
    calls: list[int] = []

    class Recovering(Double):
        def propose(self, requests: Sequence[Request]) -> list[Draft]:
            calls.append(len(requests))
            if len(calls) == 2:
                raise OSError("for a moment")
            return super().propose(requests)

    drafter = Recovering(2, oracle(2, [one.token_ids for one in expected]).make_draft)
    engine = Engine(target, drafter)
    first, second, third = (make(target, text(4 + i, seed=i), max_tokens=12) for i in range(3))
    rounds = []
    engine.add(first.request)
    engine.add(second.request)
    for _ in range(3):
        rounds += engine.step()
    engine.add(third.request)
    rounds += finish(engine)
    assert calls == [2, 2, *[1] * (len(calls) - 2)]
    assert len(calls) > 3
    faults = [round_ for round_ in rounds if round_.fault is not None]
    assert [fault.fault for fault in faults] == ["the drafter failed: OSError: for a moment"] * 2
    assert {fault.request_id for fault in faults} == {first.request.id, second.request.id}
    assert [one.request.answer_ids for one in (first, second, third)] == [
        one.ids for one in expected
    ]
    assert engine.drafter.num_held == 0


def test_too_many_tokens_are_cut(target: NativeTarget) -> None:
    expected = at_work(target, NoDrafter(), 1)[0]
    (one,) = at_work(target, Double(3, lambda *_: Draft(tuple(expected.ids[1:]))), 1)
    assert one.ids == expected.ids
    assert one.rounds[0].draft_length == one.rounds[0].num_accepted == 3
    assert one.faults == []


def test_drafts_for_the_wrong_number_of_requests_are_a_fault_of_all(target: NativeTarget) -> None:
    class Generous(Double):
        def propose(self, requests: Sequence[Request]) -> list[Draft]:
            return [*super().propose(requests), Draft((1,))]

    together = at_work(target, Generous(2, lambda *_: Draft((1, 2))))
    assert all("ValueError" in one.faults[0] for one in together)


def test_a_guard_passes_on_what_it_hears(target: NativeTarget) -> None:
    heard: list[str] = []

    class Listening(Double):
        def ready(self) -> None:
            heard.append("ready")

        def prefilled(self, seconds: float, num_tokens: int) -> None:
            heard.append(f"prefilled {num_tokens}")

        def observe(self, rounds: Sequence[Round]) -> None:
            heard.append(f"observed {[round_.num_committed for round_ in rounds]}")

        def end(self, request: Request) -> None:
            super().end(request)
            heard.append("ended")

        def close(self) -> None:
            heard.append("closed")

        def report(self) -> Any:
            return {"a": 1}

    drafter = guarded(Listening(2, lambda *_: NO_DRAFT), 97)
    engine = Engine(target, Listening(2, lambda *_: NO_DRAFT))
    drafter.ready()
    drafter.close()
    assert heard == ["ready", "closed"]
    assert drafter.report() == engine.drafter.report() == {"a": 1}
    heard.clear()
    engine.add(make(target, [1, 2, 3], max_tokens=3).request)
    finish(engine)
    assert heard == ["prefilled 3", "observed [1]", "observed [1]", "ended"]


def test_a_fault_while_others_only_wait_for_their_last_token(target: NativeTarget) -> None:
    """A request that needs no draft is not asked for, so it can't be at fault."""
    one = make(target, PROMPT, max_tokens=2)
    run_all(target, faulty(oracle(2, [])), [one])
    assert one.faults == []


def test_a_drafter_that_fails_again_and_again_is_asked_no_more(target: NativeTarget) -> None:
    calls: list[int] = []

    class Failing(NoDrafter):
        max_draft_length = 2

        def propose(self, requests: Sequence[Request]) -> list[Draft]:
            calls.append(len(requests))
            if len(calls) != 3:
                raise OSError("out of order")
            return super().propose(requests)

    engine, told = Engine(target, Failing()), []
    for _ in range(8):
        engine.add(make(target, text(4), max_tokens=3).request)
        told += [round_.fault for round_ in finish(engine) if round_.fault is not None]
    assert len(calls) == 6
    assert told[:5] == ["the drafter failed: OSError: out of order"] * 5
    assert (
        told[5:]
        == ["the drafter failed 3 times in a row and is asked no more: OSError: out of order"] * 2
    )
