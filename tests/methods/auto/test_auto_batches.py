"""Auto mode with requests that join and leave: modes change, drafters fail, answers stay the
same."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from d3d.engine.drafter import Draft, Drafter
from d3d.engine.engine import Engine
from d3d.engine.request import Request
from d3d.engine.round import Round
from d3d.errors import WorkerFailed
from d3d.methods.async_.packed_pass import PackedDrafter
from d3d.methods.auto.chooser import PLAIN, PLAIN_ROUNDS, Chooser
from d3d.methods.auto.drafter import AutoDrafter
from d3d.methods.fused.engine import FusedTarget
from d3d.methods.serial.drafter import BlockDrafter
from d3d.target.native import NativeTarget
from support.async_runs import async_drafter, coordinating
from support.auto_runs import VOCAB, Clock, Timed, auto, taking
from support.doubles import Double, always_wrong, faulty, oracle
from support.drafters import text, tiny_drafter
from support.runs import SAMPLING, Run, make, rounds_of, run, run_all

ORDER = ["serial", "async", "async", PLAIN, "fused", "fused", "own", "async", PLAIN, "serial"]
LIMITS = (40, 7, 25, 1, 60, 12, 33)


def seven(target: NativeTarget, sampling: str) -> list[Run]:
    return [
        make(target, text(3 + 9 * n, seed=n), **SAMPLING[sampling] | {"max_tokens": limit})
        for n, limit in enumerate(LIMITS)
    ]


def answers(runs: Sequence[Run]) -> list[list[int]]:
    return [one.ids for one in runs]


@pytest.mark.parametrize("sampling", ["greedy", "everything"])
def test_requests_join_leave_and_are_cancelled_while_modes_change(
    sampling: str, target: NativeTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns = iter(ORDER * 100)
    monkeypatch.setattr(Chooser, "_wanted", lambda *_: next(turns))
    model = tiny_drafter(target.model, previous_token_width=8)
    fused = FusedTarget(target, model, 4, 12)
    expected = answers(run_all(target, None, seven(target, sampling)))
    runs = seven(target, sampling)
    with coordinating(lambda: PackedDrafter(model, VOCAB)) as coordinator:
        drafter = AutoDrafter(
            {
                "serial": BlockDrafter(model, VOCAB, shared_cache=target.cache_for(model)),
                "fused": fused,
                "own": BlockDrafter(tiny_drafter(target.model, scope=None), VOCAB),
                "async": async_drafter(coordinator, draft_length=5, patience_s=20.0),
            },
            {},
        )
        engine = Engine(fused, drafter, max_batch=3)
        for one in runs[:4]:
            engine.add(one.request)
        number, drafted = 0, 0
        while engine.has_work or number < 8:
            number += 1
            drafted += sum(round_.draft_length > 0 for round_ in engine.step())
            if number == 8:
                for one in runs[4:]:
                    engine.add(one.request)
            if number == 20:
                engine.cancel(runs[4].request)
        assert (fused.num_held, drafter.num_held, len(coordinator._sequences)) == (0, 0, 0)
    assert runs[4].finish_reason == "cancelled"
    assert 0 < len(runs[4].ids) < LIMITS[4]
    got = answers(runs)
    assert got[4] == expected[4][: len(got[4])]
    assert got[:4] + got[5:] == expected[:4] + expected[5:]
    assert drafter.report().faults == ()
    assert drafter.report().rounds.keys() == {PLAIN, "serial", "fused", "own", "async"}
    assert drafted > 20


class Stubborn(Double):
    """Fails in one request's draft, and then does not let go of a request without an error."""

    def suspend(self, request: Request) -> None:
        raise RuntimeError("told not to be suspended")

    def end(self, request: Request) -> None:
        super().end(request)
        raise RuntimeError("told not to end")


def test_a_mode_that_fails_for_one_request_is_left_out_and_the_others_draft_for_all(
    target: NativeTarget, clock: Clock
) -> None:
    timed = Timed(target, clock)
    expected = run_all(timed, None, seven(timed, "greedy"))
    known = [one.token_ids for one in expected]
    marked = text(3 + 9 * 2, seed=2)

    def fails_for_one(request: Request, length: int, number: int) -> Draft:
        wanted = faulty(oracle(8, known)) if request.token_ids[:21] == marked else oracle(8, known)
        return wanted.make_draft(request, length, 0)

    serial, fast = Stubborn(8, fails_for_one), taking(oracle(8, known), 0.05, clock)
    drafter = auto({"serial": serial, "async": fast})
    runs = seven(timed, "greedy")
    left_out_at = None
    for number, _ in enumerate(rounds_of(timed, drafter, runs, max_batch=3)):
        if left_out_at is None and "serial" in drafter.report().left_out:
            left_out_at, num_drafts = number, serial.num_drafts
    assert answers(runs) == answers(expected)
    assert not any(one.faults for one in runs), "the requests themselves go on drafting"
    report = drafter.report()
    assert report.left_out == {"serial": "told to be faulty"}
    assert report.faults == ("serial: told to be faulty",)
    assert report.mode == "async"
    assert serial.num_drafts == num_drafts, "those that joined later do not ask it either"
    assert runs[5].rounds[-2].num_accepted > 0
    assert runs[6].rounds[-2].num_accepted > 0


def test_what_is_measured_is_kept_by_the_number_of_requests(
    target: NativeTarget, clock: Clock
) -> None:
    """A draft costs 0.9 s for each request: worth it for one, not for eight, whose plain rounds
    take as long as those of one."""
    timed = Timed(target, clock)
    lengths = [150] + [90] * 7
    expected = run_all(timed, None, [make(timed, text(5, n), max_tokens=90) for n in range(8)])
    long = run(timed, prompt=text(5, 0), max_tokens=150)
    known = [long.token_ids, *(one.token_ids for one in expected[1:])]
    drafter = auto({"serial": taking(oracle(8, known), 0.9, clock)})
    assert run(timed, drafter, text(5, 0), max_tokens=150).ids == long.ids
    assert drafter.report().mode == "serial"
    runs = [make(timed, text(5, n), max_tokens=length) for n, length in enumerate(lengths)]
    together: list[str] = []
    for _ in rounds_of(timed, drafter, runs):
        if sum(not one.request.finished for one in runs) == 8:
            together.append(drafter.report().mode)
    assert answers(runs[1:]) == answers(expected[1:])
    assert runs[0].ids == long.ids
    assert together[-1] == PLAIN
    assert drafter.report().mode == "serial", "alone again, what was known of one holds"
    alone = [round_.draft_length > 0 for round_ in runs[0].rounds[90:]]
    assert sum(alone) > 0.8 * len(alone)


# The report


def test_a_report_is_of_the_requests_since_there_was_none(
    target: NativeTarget, clock: Clock
) -> None:
    timed = Timed(target, clock)
    known = [run(timed, prompt=text(5, n), max_tokens=60).token_ids for n in range(3)]
    drafter = auto({"serial": taking(faulty(oracle(8, known), 2), 0.2, clock)})
    runs = [make(timed, text(5, n), max_tokens=60 - 20 * (n % 2)) for n in range(3)]
    steps: set[float] = set()
    for round_ in rounds_of(timed, drafter, runs, max_batch=2):
        if round_.number:
            steps.add(round_.started)
    report = drafter.report()
    # the round that failed is not counted, and the last token is nobody's to draft
    assert len(steps) - 2 <= sum(report.rounds.values()) <= len(steps), "a round counts once"
    assert report.left_out == {"serial": "told to be faulty"}
    one = make(timed, text(5, 0), max_tokens=1)
    run_all(timed, drafter, [one])
    assert drafter.report().rounds == {}
    assert drafter.report().left_out == {}
    run_all(timed, drafter, [make(timed, text(5, 0), max_tokens=60)])
    assert drafter.report().left_out == {}, "it has had another chance"
    assert drafter.report().mode == "serial"


# Starting


class Unstartable(Double):
    """Starts at the second attempt."""

    attempts = 0

    def ready(self) -> None:
        self.attempts += 1
        if self.attempts == 1:
            raise WorkerFailed("told not to start")


def test_a_drafter_that_can_not_start_is_left_out_until_it_can(
    target: NativeTarget, clock: Clock
) -> None:
    timed = Timed(target, clock)
    plain = run(timed, max_tokens=60)
    fast = Unstartable(8, oracle(8, [plain.token_ids]).make_draft)
    drafter = auto({"async": fast, "serial": always_wrong(8, [plain.token_ids], VOCAB)})
    drafter.ready()
    assert run(timed, drafter, max_tokens=60).ids == plain.ids
    assert drafter.report().left_out == {"async": "told not to start"}
    assert fast.num_drafts == 0
    drafter.ready()
    assert run(timed, drafter, max_tokens=60).ids == plain.ids
    assert drafter.report().left_out == {}
    assert fast.num_drafts > 0


def test_a_drafter_that_must_start_raises() -> None:
    drafter = AutoDrafter(
        {"async": Unstartable(8, oracle(8, []).make_draft)}, {}, required=["async"]
    )
    with pytest.raises(WorkerFailed, match="told not to start"):
        drafter.ready()


def test_every_drafter_is_closed_even_if_one_can_not_be() -> None:
    closed: list[str] = []

    class Closing(Double):
        def close(self) -> None:
            closed.append("closed")
            raise RuntimeError("told not to close")

    drafters: dict[str, Drafter] = {
        name: Closing(8, oracle(8, []).make_draft) for name in ("serial", "async")
    }
    with pytest.raises(RuntimeError, match="told not to close"):
        AutoDrafter(drafters, {}).close()
    assert closed == ["closed"] * 2


def test_rounds_are_told_to_the_drafter_that_drafted_them(
    target: NativeTarget, clock: Clock
) -> None:
    told: list[Round] = []

    class Observing(Double):
        def observe(self, rounds: Sequence[Round]) -> None:
            told.extend(rounds)

    timed = Timed(target, clock)
    plain = run(timed, max_tokens=60)
    serial = Observing(8, oracle(8, [plain.token_ids]).make_draft)
    one = run(timed, auto({"serial": serial}), max_tokens=60)
    drafted = [round_ for round_ in one.rounds if round_.draft_length]
    assert len(drafted) > 5
    assert [round_ for round_ in told if round_.draft_length] == drafted
    assert not {round_.number for round_ in told} & set(range(PLAIN_ROUNDS))
