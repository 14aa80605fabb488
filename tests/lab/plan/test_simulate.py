"""The model's arithmetic, against cases worked out by hand."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from d3d.engine.round import Preparation
from d3d.errors import InvalidRequest
from d3d.lab.plan.costs import ONE_DEVICE, Contention, ThinnedDraft, interpolate
from d3d.lab.plan.plan import Scenario, advice, options
from d3d.lab.plan.simulate import RoundWork, asynchronous, fused, pipeline, plain, serial, spread
from d3d.lab.plan.trace import TracedRound, bare_round, of_histogram

SWITCH = 0.1


@dataclass(frozen=True)
class FixedCosts:
    """A verification takes 4, a draft 3, a preparation 1 an outcome, whatever their sizes."""

    has_drafter: bool = True
    has_fused: bool = True
    switch_s: float = SWITCH
    rest_s: float = 0.0
    packed_s: float = 1.0
    read_s: float = 0.0
    has_own_cache: bool = False

    def verify(self, rows: int, context: float) -> float:
        return 4.0

    def draft(self, draft_length: int, context: float) -> float:
        return 3.0

    def packed(self, draft_length: int, outcomes: int, context: float) -> float:
        return self.packed_s * outcomes

    def fused(self, rows: int, context: float) -> float:
        return 5.0

    def read(self, context: float) -> float:
        return self.read_s


ROUNDS = [TracedRound(bare_round(5, 2, 3), 100 + 3 * number) for number in range(10)]


def test_plain_takes_a_verification_a_token_and_serial_the_sum_of_both_a_round() -> None:
    assert plain(ROUNDS, FixedCosts()).seconds == pytest.approx(30 * 4)
    one = serial(ROUNDS, FixedCosts(rest_s=0.5))
    assert one.seconds == pytest.approx(10 * (3 + 4 + 0.5))
    assert one.tpot_s == pytest.approx(75 / 30)
    assert (one.draft_s, one.verify_s, one.rest_s) == pytest.approx((30, 40, 5))


def test_fused_takes_one_pass_a_round() -> None:
    assert fused(ROUNDS, FixedCosts(), 8).tpot_s == pytest.approx(5 / 3)


def test_a_fused_pass_that_had_no_slots_was_a_verification() -> None:
    rounds = [TracedRound(bare_round(5, 2, 3, num_slots=number % 2), 100) for number in range(10)]
    assert fused(rounds, FixedCosts(), 8).seconds == pytest.approx(5 * 5 + 5 * 4)


@pytest.mark.parametrize(("outcomes", "longer"), [(1, 4), (4, 4), (7, 7)])
def test_with_all_hits_a_round_takes_the_longer_of_both_and_a_switch(
    outcomes: int, longer: int
) -> None:
    one = asynchronous(ROUNDS, FixedCosts(), outcomes, (1.0,))
    first_draft, last_verification = 3, 4
    assert one.seconds == pytest.approx(
        first_draft + 9 * (longer + SWITCH) + SWITCH + last_verification
    )
    assert one.hit_rate == 1
    assert one.late == (9 if outcomes > 4 else 0)


@pytest.mark.parametrize(("outcomes", "longer"), [(1, 4), (7, 7)])
def test_with_no_hits_each_round_waits_for_a_draft_too(outcomes: int, longer: int) -> None:
    one = asynchronous(ROUNDS, FixedCosts(), outcomes, (0.0,))
    assert one.seconds == pytest.approx(3 + 9 * (longer + 3 + SWITCH) + SWITCH + 4)
    assert one.hit_rate == 0
    assert one.draft_s == pytest.approx(10 * 3 + 9 * (longer - 4))


def test_each_request_begins_with_a_draft_for_which_the_worker_reads_the_prompt() -> None:
    rounds = [one._replace(first=number in (0, 4)) for number, one in enumerate(ROUNDS)]
    known, unknown = (
        asynchronous(rounds, FixedCosts(read_s=read_s), 1, (1.0,)) for read_s in (20.0, 0.0)
    )
    assert known.seconds - unknown.seconds == pytest.approx(2 * (20 - 3))
    assert known.hit_rate == 1, (
        "a first round has nothing to find, and counts as neither hit nor miss"
    )
    assert known.seconds == pytest.approx(2 * 20 + 8 * (4 + SWITCH) + 2 * (4 + SWITCH))


@pytest.mark.parametrize("length", [2, 3, 5])
@pytest.mark.parametrize("rate", [0.2, 0.5, 0.8])
def test_a_given_hit_rate_is_that_of_the_rounds_that_can_hit(rate: float, length: int) -> None:
    rounds = [
        TracedRound(bare_round(5, 2, 3), 100, first=number % length == 0) for number in range(60)
    ]
    assert asynchronous(rounds, FixedCosts(), 1, (rate,)).hit_rate == pytest.approx(rate, abs=0.03)


def test_in_serial_mode_a_drafter_reads_the_prompt_where_it_has_a_cache_of_its_own() -> None:
    rounds = [one._replace(first=number in (0, 4)) for number, one in enumerate(ROUNDS)]
    shared, own = (
        serial(rounds, FixedCosts(read_s=20.0, has_own_cache=own)).seconds for own in (False, True)
    )
    assert own - shared == pytest.approx(2 * (20 - 3))


def test_every_second_hit_costs_half_of_the_drafts() -> None:
    none, half, all_ = (
        asynchronous(ROUNDS[:9], FixedCosts(), 1, (rate,)).seconds for rate in (0.0, 0.5, 1.0)
    )
    assert none - half == pytest.approx(half - all_) == pytest.approx(4 * 3)


def test_hits_that_the_rounds_tell_are_taken_as_they_are() -> None:
    told = [
        one._replace(
            record=one.record._replace(preparation=Preparation("miss" if number % 3 else "hit"))
        )
        for number, one in enumerate(ROUNDS)
    ]
    assert asynchronous(told, FixedCosts(), 1, (1.0,)).hit_rate == pytest.approx(3 / 9)


def test_the_parts_of_a_round_add_up_and_a_round_without_a_draft_waits_for_nobody() -> None:
    rounds = [*ROUNDS, TracedRound(bare_round(0, 0, 1), 130)]
    one = asynchronous(rounds, FixedCosts(rest_s=0.2), 7, (0.6,))
    assert one.verify_s + one.draft_s + one.switch_s + one.rest_s == pytest.approx(one.seconds)
    assert one.switch_s == pytest.approx(10 * SWITCH)
    done = pipeline([RoundWork(4, 0, 0, None)], SWITCH)
    assert (done[0].verify_from, done[0].ended) == (0, 4)


def test_on_one_device_nothing_is_hidden() -> None:
    (one, other) = pipeline(
        [RoundWork(4, 3, 6, False), RoundWork(4, 3, 6, True)], 0.0, contention=ONE_DEVICE
    )
    assert one.verify_until == 3 + 8
    assert one.prepared_until == other.verify_from == 3 + 4 + 6
    (short,) = pipeline([RoundWork(4, 0, 1, None)], 0.0, contention=ONE_DEVICE)
    assert (short.prepared_until, short.verify_until) == (2, 5)
    (uneven,) = pipeline([RoundWork(4, 0, 9, None)], 0.0, contention=Contention(1.5, 3.0))
    assert (uneven.verify_until, uneven.prepared_until) == (6, 6 + 9 - 2)


def test_sides_with_threads_of_their_own_are_slower_all_the_time() -> None:
    slower = Contention(1.5, 3.0, 2.0, lasting=True)
    (one, other) = pipeline(
        [RoundWork(4, 3, 1, False), RoundWork(4, 3, 9, True)], 0.0, contention=slower
    )
    assert (one.verify_from, one.verify_until, one.prepared_until) == (6, 12, 9)
    assert (other.verify_until, other.prepared_until) == (18, 12 + 27)


def test_the_same_question_has_the_same_answer() -> None:
    trace = of_histogram([5, 3, 2, 4], source="x")
    assert of_histogram([5, 3, 2, 4], source="x") == trace
    setup = Scenario(FixedCosts(), trace, fused_rows=8)
    assert options(setup) == options(setup)
    assert advice(setup) == advice(setup)


def test_shares_are_spread_evenly_and_come_out_right() -> None:
    assert spread([0.5] * 4) == [False, True, False, True]
    assert sum(spread([0.3] * 100)) == 30
    assert spread([1.0, 0.0, 1.0]) == [True, False, True]


def test_lines_go_through_the_points_and_beyond() -> None:
    points = [(1.0, 2.0), (3.0, 6.0), (5.0, 6.0)]
    assert [interpolate(points, x) for x in (0, 1, 2, 4, 7)] == pytest.approx([0, 2, 4, 6, 6])
    assert interpolate([(4.0, 1.5)], 100) == 1.5
    assert interpolate([(1.0, 5.0), (2.0, 1.0)], 9) == 0


def test_advice_finds_what_helps_and_says_how_far_acceptance_may_fall() -> None:
    # nothing beyond the second token is ever kept, and a preparation of eight outcomes takes twice
    # a verification
    setup = Scenario(
        FixedCosts(),
        of_histogram([1, 1, 8, 0, 0, 0], source="x"),
        outcomes=8,
        hit_rate=1.0,
        second_device=True,
    )
    found = {one.change: one for one in advice(setup, [(15, 0.5)])}
    thin = found["keep 15 of the drafter's layers"]
    base, changed = (
        min(one.modelled.tpot_s for one in options(setup)),
        thin.option.modelled.tpot_s,
    )
    assert thin.gain == pytest.approx(base / changed)
    assert thin.proviso == f"if acceptance length stays above {2.7 * changed / base:.2f}"
    assert "give the drafter a second device like this one" not in found


def test_a_drafter_of_fewer_layers_keeps_its_fused_mode() -> None:
    assert ThinnedDraft(FixedCosts(), 0.5).has_fused
    assert not ThinnedDraft(FixedCosts(has_fused=False), 0.5).has_fused
    whole, thin = (
        {
            one.label: one.modelled.tpot_s
            for one in options(Scenario(costs, of_histogram([1, 1, 8], source="x"), fused_rows=8))
        }
        for costs in (FixedCosts(), ThinnedDraft(FixedCosts(), 0.5))
    )
    assert thin["fused, 8 rows"] == whole["fused, 8 rows"], (
        "clean rows go through all layers, and are most of a pass"
    )
    assert thin["serial 2"] < whole["serial 2"]


@pytest.mark.parametrize(
    "fields", [{"outcomes": 0}, {"outcomes": 257}, {"hit_rate": 1.5}, {"fused_rows": 1}]
)
def test_an_impossible_setup_is_refused(fields: dict[str, float]) -> None:
    with pytest.raises(InvalidRequest, match=r"is not within|leaves no room"):
        Scenario(FixedCosts(), of_histogram([1, 1], source="x"), **fields)  # type: ignore[arg-type]


def test_no_rounds_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="no round"):
        plain([], FixedCosts())
