"""Auto mode in the loop: modes change between rounds, answers do not. Times are scripted; no real
clock is read."""

from __future__ import annotations

from typing import Any

import pytest

from d3d.engine.request import Request
from d3d.methods.auto.chooser import PLAIN
from d3d.methods.auto.drafter import AutoDrafter
from d3d.methods.fused.engine import FusedTarget
from d3d.methods.serial.drafter import BlockDrafter
from d3d.model.drafter import DrafterModel
from d3d.target.native import NativeTarget
from support.auto_runs import VOCAB, Clock, Timed, auto, taking
from support.doubles import Double, always_wrong, failing, faulty, oracle, wrong_at
from support.drafters import text, tiny_drafter
from support.runs import SAMPLING, Run, make, run, run_all


def beside(target: NativeTarget, model: DrafterModel, **options: Any) -> BlockDrafter:
    """On the target's own cache, if the drafter's clean rows are the target's."""
    return BlockDrafter(model, VOCAB, shared_cache=target.cache_for(model), **options)


@pytest.mark.parametrize("sampling", ["greedy", "temperature"])
def test_a_hopeless_drafter_costs_a_tenth_of_the_time_at_most(
    sampling: str, target: NativeTarget, clock: Clock
) -> None:
    params = SAMPLING[sampling] | {"max_tokens": 128}
    engine = Timed(target, clock)
    plain = run(engine, **params)
    plain_s, before = clock.now, clock.now
    answers = [plain.token_ids]
    drafter = auto({"serial": taking(always_wrong(8, answers, VOCAB), 1.1, clock)})
    for _ in range(3):
        (one,) = run_all(engine, drafter, [make(engine, **params)])
        assert one.ids == plain.ids
        assert clock.now - before <= 1.1 * plain_s
        before = clock.now
        report = drafter.report()
        assert report.mode == PLAIN
        assert "drafting does not pay here" in report.why
        assert sum(report.rounds.values()) == len(one.rounds) - 1, (
            "the last token needs no draft, so nobody is asked"
        )


def test_the_best_mode_is_taken_and_remembered(target: NativeTarget, clock: Clock) -> None:
    engine = Timed(target, clock)
    plain = run(engine, max_tokens=200)
    answers = [plain.token_ids]
    slow, fast = wrong_at(1, 8, answers, VOCAB), oracle(8, answers)
    drafter = auto({"serial": taking(slow, 0.8, clock), "async": taking(fast, 0.2, clock)})
    for number in range(2):
        before = clock.now
        (one,) = run_all(engine, drafter, [make(engine, max_tokens=200)])
        assert one.ids == plain.ids
        report = drafter.report()
        assert report.mode == "async"
        assert report.tpot_s["async"] < report.tpot_s["serial"] < report.tpot_s[PLAIN] + 0.2
        if number:
            assert report.rounds["async"] > 0.8 * len(one.rounds)
            assert clock.now - before < 1.15 * 200 * 1.4 / 6


def test_the_first_token_and_the_first_rounds_wait_for_no_drafter(
    target: NativeTarget, clock: Clock
) -> None:
    drafter = auto({"serial": failing(oracle(8, []))})
    engine = Timed(target, clock)
    (one,) = run_all(engine, drafter, [make(engine, max_tokens=4)])
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
    (one,) = run_all(engine, drafter, [make(engine, max_tokens=150)])
    assert one.ids == plain.ids
    assert one.faults == [], "the request itself goes on drafting"
    report = drafter.report()
    assert report.mode == "async"
    assert "told to" in report.left_out["serial"]
    assert len(report.faults) == 1


def test_modes_that_change_every_round_leave_the_answer_as_it_is(
    target: NativeTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shared cache, fused passes and a cache of its own, in one answer; also in batches that
    shrink."""
    model = tiny_drafter(target.model, previous_token_width=8)
    own = tiny_drafter(target.model, scope=None)
    fused = FusedTarget(target, model, 4, 12)
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
                "d3d.methods.auto.chooser.Chooser._wanted", lambda *_, turns=turns: next(turns)
            )
            drafter = AutoDrafter(
                {
                    "serial": beside(target, model, draft_length=5),
                    "fused": fused,
                    "own": beside(target, own, draft_length=6),
                },
                {},
            )

            def runs(lengths: tuple[int, ...] = lengths, sampling: str = sampling) -> list[Run]:
                return [
                    make(target, text(4 + n, seed=n), max_tokens=length, **SAMPLING[sampling])
                    for n, length in enumerate(lengths)
                ]

            together = run_all(fused, drafter, runs())
            assert [one.ids for one in together] == [
                one.ids for one in run_all(target, None, runs())
            ]
            report = drafter.report()
            assert report.faults == ()
            assert report.rounds.keys() == {PLAIN, "serial", "fused", "own"}
            drafted = [round_.draft_length for one in together for round_ in one.rounds]
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
    monkeypatch.setattr("d3d.methods.auto.chooser.Chooser._wanted", lambda *_: next(turns))
    serial = beside(target, model, draft_length=5, lookup=8, least_kept=9.0)
    drafter = AutoDrafter({"serial": serial}, {})
    run = make(target, text(80), max_tokens=60)
    assert (
        run_all(target, drafter, [run])[0].ids
        == run_all(target, None, [make(target, text(80), max_tokens=60)])[0].ids
    )
    drafts = sum(round_.draft_length > 0 for round_ in run.rounds)
    assert 2 <= drafts <= 6, "a pause goes on where a turn has ended"
    assert len(rows) >= drafts
    assert sum(rows) < 80 + 60 + 9 * len(rows), "the text is read once"


def test_a_drafter_is_told_when_its_turn_ends(target: NativeTarget, clock: Clock) -> None:
    suspended: list[int] = []

    class Holding(Double):
        def suspend(self, request: Request) -> None:
            suspended.append(request.id)

    hopeless = Holding(8, always_wrong(8, [], VOCAB).make_draft)
    engine = Timed(target, clock)
    request = make(engine, max_tokens=40)
    run_all(engine, auto({"async": hopeless}), [request])
    assert suspended == [request.request.id], "hopeless, so it was left long before the end"
