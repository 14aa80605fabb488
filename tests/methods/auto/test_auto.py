"""Auto mode in the loop: modes change between rounds, the answer does not. Time is scripted; no
real clock decides anything."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from d3d.engine.drafter import Drafter
from d3d.methods.auto.chooser import PLAIN, ModeTimes
from d3d.methods.auto.drafter import AutoDrafter
from d3d.methods.fused.engine import FusedEngine
from d3d.methods.serial.drafter import BlockDrafter
from d3d.target.native import NativeTarget
from support.doubles import Double, always_wrong, failing, faulty, oracle, wrong_at
from support.drafters import text, tiny_drafter
from support.runs import SAMPLING, Run, make, run, run_all
from support.tiny import tiny_transformer

VOCAB = 97


class Clock:
    """Stands still but where it is told to go on."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Timed:
    """A target whose passes take a second and a share of one for each row more."""

    def __init__(self, engine: Any, clock: Clock, row_s: float = 0.04) -> None:
        self._engine, self._clock, self._row_s = engine, clock, row_s
        self.vocab_size, self.max_length = engine.vocab_size, engine.max_length

    def open(self, num_sequences: int, capacity: int) -> Any:
        session = self._engine.open(num_sequences, capacity)
        forward = session.forward

        def timed(token_ids: list[list[int]], *, last_only: bool = False) -> Any:
            self._clock.now += 1 + self._row_s * (max(map(len, token_ids)) - 1)
            return forward(token_ids, last_only=last_only)

        session.forward = timed
        return session


def taking(double: Double, seconds: float, clock: Clock) -> Double:
    def propose(*arguments: Any) -> Any:
        clock.now += seconds
        return double.propose(*arguments)

    return Double(double.block_size, propose)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    for module in (loop, one_round):
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=clock))
    return clock


@pytest.fixture(scope="module")
def target() -> NativeTarget:
    return NativeTarget(tiny_transformer(seed=1))


def auto(
    drafters: dict[str, Drafter], times: dict[int, ModeTimes] | None = None, draft_length: int = 5
) -> AutoDrafter:
    return AutoDrafter(
        {mode: Candidate(one, draft_length) for mode, one in drafters.items()},
        {},
        {} if times is None else times,
    )


def decode(engine: Any, drafter: AutoDrafter, runs: list[Run]) -> list[Run]:
    return run_all(engine, drafter, runs, drafter.block_size)


Make = Callable[[int, list[list[int]]], Double]


@pytest.mark.parametrize("sampling", ["greedy", "temperature"])
def test_a_hopeless_drafter_costs_a_tenth_of_the_time_at_most(
    sampling: str, target: NativeTarget, clock: Clock
) -> None:
    params = SAMPLING[sampling] | {"max_tokens": 128}
    engine = Timed(target, clock)
    plain = run(engine, **params)
    plain_s, before = clock.now, clock.now
    answers = [plain.token_ids]
    times: dict[int, ModeTimes] = {}
    for _ in range(3):
        drafter = auto({"serial": taking(always_wrong(8, answers, VOCAB), 1.1, clock)}, times)
        (one,) = decode(engine, drafter, [make(engine, **params)])
        assert one.ids == plain.ids
        assert clock.now - before <= 1.1 * plain_s
        before = clock.now
        choice = drafter.report()
        assert choice.mode == PLAIN
        assert "drafting does not pay here" in choice.why
        assert sum(choice.rounds.values()) == len(one.rounds) - 1, (
            "the last token needs no draft, so nobody is asked"
        )


def test_the_best_mode_is_taken_and_remembered(target: NativeTarget, clock: Clock) -> None:
    engine = Timed(target, clock)
    plain = run(engine, max_tokens=200)
    answers = [plain.token_ids]
    times: dict[int, ModeTimes] = {}

    def both() -> dict[str, Drafter]:
        slow, fast = wrong_at(1, 8, answers, VOCAB), oracle(8, answers)
        return {"serial": taking(slow, 0.8, clock), "async": taking(fast, 0.2, clock)}

    for number in range(2):
        before, drafter = clock.now, auto(both(), times)
        (one,) = decode(engine, drafter, [make(engine, max_tokens=200)])
        assert one.ids == plain.ids
        choice = drafter.report()
        assert choice.mode == "async"
        assert choice.tpot_s["async"] < choice.tpot_s["serial"] < choice.tpot_s[PLAIN] + 0.2
        if number:
            assert choice.rounds["async"] > 0.8 * len(one.rounds)
            assert clock.now - before < 1.15 * 200 * 1.4 / 6


def test_the_first_token_and_the_first_rounds_wait_for_no_drafter(
    target: NativeTarget, clock: Clock
) -> None:
    drafter = auto({"serial": failing(oracle(8, []))})
    engine = Timed(target, clock)
    (one,) = decode(engine, drafter, [make(engine, max_tokens=4)])
    assert one.ids == run(target, max_tokens=4).ids
    assert drafter.report().faults == ()
    assert "could not be tried" in drafter.report().why


@pytest.mark.parametrize("break_it", [failing, faulty], ids=["raises", "faulty"])
def test_a_mode_that_breaks_is_left_out_and_the_others_go_on(
    break_it: Any, target: NativeTarget, clock: Clock
) -> None:
    engine = Timed(target, clock)
    plain = run(engine, max_tokens=150)
    answers = [plain.token_ids]
    serial = taking(break_it(oracle(8, answers), 3), 0.1, clock)
    drafter = auto({"serial": serial, "async": taking(oracle(8, answers), 0.3, clock)})
    (one,) = decode(engine, drafter, [make(engine, max_tokens=150)])
    assert one.ids == plain.ids
    assert one.faults == [], "the request itself goes on drafting"
    choice = drafter.report()
    assert choice.mode == "async"
    assert "told to" in choice.left_out["serial"]
    assert len(choice.faults) == 1


def test_modes_that_change_every_round_leave_the_answer_as_it_is(
    target: NativeTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shared cache, fused passes and a cache of its own, in one answer; also in batches that
    shrink."""
    model = tiny_drafter(target.model, previous_token_width=8)
    own = tiny_drafter(target.model, scope=None)
    fused = FusedEngine(target, model, 4, 12)
    order = [
        "serial",
        PLAIN,
        "fused",
        "fused",
        "own",
        "serial",
        "fused",
        PLAIN,
        PLAIN,
        "own",
        "own",
    ]
    for sampling in ("greedy", "temperature"):
        for lengths in ((60,), (70, 20, 45)):
            turns = iter(order * 100)
            monkeypatch.setattr(
                "d3d.decoding.mode_choice.Chooser._wanted", lambda *_, turns=turns: next(turns)
            )
            drafter = AutoDrafter(
                {
                    "serial": Candidate(BlockDrafter(model, VOCAB), 5),
                    "fused": Candidate(fused.drafter, 4),
                    "own": Candidate(BlockDrafter(own, VOCAB), 6),
                },
                {},
                {},
            )

            def runs(lengths: tuple[int, ...] = lengths, sampling: str = sampling) -> list[Run]:
                return [
                    make(target, text(4 + n, seed=n), max_tokens=length, **SAMPLING[sampling])
                    for n, length in enumerate(lengths)
                ]

            together = decode(fused, drafter, runs())
            assert [one.ids for one in together] == [
                one.ids for one in run_all(target, None, runs(), 0)
            ]
            choice = drafter.report()
            assert choice.faults == ()
            assert choice.rounds.keys() == {PLAIN, "serial", "fused", "own"}
            drafted = [stats.draft_length for one in together for stats in one.rounds]
            assert sum(length > 0 for length in drafted) > len(drafted) // 4


@pytest.mark.parametrize(
    "scope", ["slots", None], ids=["on the target's cache", "with a cache of its own"]
)
def test_what_spares_drafts_keeps_its_cache_and_its_memory_over_turns(
    scope: str | None, target: NativeTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_drafter(target.model, scope=scope)
    rows: list[int] = []
    hidden = model.hidden
    monkeypatch.setattr(
        model, "hidden", lambda ids, *rest: (rows.append(ids.shape[1]), hidden(ids, *rest))[1]
    )
    turns = iter(([PLAIN] * 2 + ["serial"] * 4) * 100)
    monkeypatch.setattr("d3d.decoding.mode_choice.Chooser._wanted", lambda *_: next(turns))
    drafter = LookupFirst(Pausing(BlockDrafter(model, VOCAB), 9.0), 8)
    auto_drafter = AutoDrafter({"serial": Candidate(drafter, 5)}, {}, {})
    run = make(target, text(80), max_tokens=60)
    assert (
        decode(target, auto_drafter, [run])[0].ids
        == run_all(target, None, [make(target, text(80), max_tokens=60)], 0)[0].ids
    )
    drafts = sum(stats.draft_length > 0 for stats in run.rounds)
    assert 2 <= drafts <= 6, "a pause goes on where a turn has ended"
    assert len(rows) >= drafts
    assert sum(rows) < 80 + 60 + 9 * len(rows), "the text is read once"


def test_what_holds_something_elsewhere_is_closed_when_its_turn_ends(
    target: NativeTarget, clock: Clock
) -> None:
    closed: list[int] = []

    class Holding:
        block_size = 8

        def open(self, num_sequences: int, capacity: int) -> Any:
            session = always_wrong(8, [], VOCAB).open(num_sequences, capacity)
            session.close = lambda: closed.append(1)  # type: ignore[attr-defined]
            return session

    engine = Timed(target, clock)
    decode(engine, auto({"async": Holding()}), [make(engine, max_tokens=40)])
    assert closed, "hopeless, so it was left long before the end"
