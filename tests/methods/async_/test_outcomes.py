"""Likely outcomes of a draft, from hand-made probabilities."""

from __future__ import annotations

import itertools
import math

import pytest

from d3d.methods.async_.outcomes import PRIOR, Doubt, Outcome, Place, likely_outcomes, within_budget

PLACES = [
    Place((1, 2, 3), (0.7, 0.2, 0.1)),
    Place((4, 5, 6), (0.5, 0.4, 0.1)),
    Place((7, 8), (0.6, 0.4)),
]


def chance(outcome: Outcome) -> float:
    """Of an outcome of the draft 1, 4 by the definition."""
    reached = [1.0, 0.7, 0.35][outcome.num_accepted]
    return reached * PLACES[outcome.num_accepted].chance(outcome.bonus_token)


def test_the_likeliest_come_first() -> None:
    everything = likely_outcomes([1, 4], PLACES, 100)
    possible = [
        (k, t)
        for k, place in enumerate(PLACES)
        for t in place.token_ids
        if (k, t) not in ((0, 1), (1, 4))
    ]
    assert sorted(everything) == sorted(possible)
    assert all(chance(a) >= chance(b) for a, b in itertools.pairwise(everything))
    assert sum(map(chance, everything)) == pytest.approx(1.0)
    assert everything[:2] == [Outcome(1, 5), Outcome(2, 7)]


@pytest.mark.parametrize("budget", range(1, 8))
def test_the_budget_holds_and_keeps_the_best(budget: int) -> None:
    assert likely_outcomes([1, 4], PLACES, budget) == likely_outcomes([1, 4], PLACES, 100)[:budget]


def test_a_rejected_token_is_never_its_own_bonus_token() -> None:
    assert all(
        o.bonus_token != 1 for o in likely_outcomes([1], PLACES[:2], 9) if o.num_accepted == 0
    )


def test_an_unlikely_whole_draft_is_prepared_for_all_the_same() -> None:
    places = [Place((1, 2, 3), (0.02, 0.5, 0.48)), Place((4,), (1.0,))]
    assert likely_outcomes([1], places, 2) == [Outcome(0, 2), Outcome(1, 4)]
    assert likely_outcomes([1], places, 1) == [Outcome(0, 2)]


@pytest.mark.parametrize("larger", range(1, 8))
def test_a_list_cut_to_a_smaller_budget_is_the_list_of_that_budget(larger: int) -> None:
    unlikely = [
        Place((1, 2, 3), (0.02, 0.5, 0.48)),
        Place((4, 5, 6), (0.3, 0.4, 0.3)),
        Place((7, 8), (0.6, 0.4)),
    ]
    for places in (PLACES, unlikely):
        for budget in range(1, larger + 1):
            listed = within_budget(likely_outcomes([1, 4], places, larger), budget, 2)
            assert listed == likely_outcomes([1, 4], places, budget)


def test_a_drafted_token_that_no_guess_names_ends_what_can_be_expected() -> None:
    assert {o.num_accepted for o in likely_outcomes([9, 4], PLACES, 3)} == {0, 2}


def test_no_guess_is_no_outcome() -> None:
    assert likely_outcomes([], [Place((), ())], 4) == []
    assert likely_outcomes([], [Place((1, 2), (0.0, float("nan")))], 4) == []


@pytest.mark.parametrize(("num_places", "budget"), [(2, 4), (3, 0)])
def test_too_few_places_and_no_budget_are_refused(num_places: int, budget: int) -> None:
    with pytest.raises(ValueError, match="need 3 places"):
        likely_outcomes([1, 4], PLACES[:num_places], budget)


# What a clean row's doubt is worth


def test_doubt_that_means_nothing_moves_an_outcome_behind_those_that_accept_the_token() -> None:
    places = [Place((1, 2), (0.55, 0.45)), Place((7, 8), (0.6, 0.4))]
    assert likely_outcomes([1], places, 3) == [Outcome(0, 2), Outcome(1, 7), Outcome(1, 8)]
    assert likely_outcomes([1], places, 3, num_clean=1, doubt=0.1) == [
        Outcome(1, 7),
        Outcome(1, 8),
        Outcome(0, 2),
    ]
    assert likely_outcomes([1], places, 3, num_clean=0, doubt=0.1) == likely_outcomes(
        [1], places, 3
    ), "no slot is meant"


def test_the_less_doubt_means_the_surer_is_a_token_rejected_that_is_not_a_rows_best() -> None:
    places = [Place((2, 1, 3), (0.36, 0.35, 0.29)), Place((7,), (1.0,))]
    assert likely_outcomes([1], places, 3) == [Outcome(0, 2), Outcome(1, 7), Outcome(0, 3)]
    assert likely_outcomes([1], places, 3, num_clean=2, doubt=0.2) == [
        Outcome(0, 2),
        Outcome(0, 3),
        Outcome(1, 7),
    ]


def test_chances_with_doubt_are_those_of_the_definition() -> None:
    # kept with 0.7 ** 0.5; then 0.5 as it is: (1, 5) comes with 0.4, (0, 2) with the rest of 0.7 **
    # 0.5 times 0.2 / 0.3
    kept = math.sqrt(0.7)
    chances = {
        Outcome(0, 2): (1 - kept) * 2 / 3,
        Outcome(0, 3): (1 - kept) / 3,
        Outcome(1, 5): kept * 0.4,
        Outcome(1, 6): kept * 0.1,
    }
    chances |= {Outcome(2, 7): kept * 0.5 * 0.6, Outcome(2, 8): kept * 0.5 * 0.4}
    assert sum(chances.values()) == pytest.approx(1.0)
    assert likely_outcomes([1, 4], PLACES, 9, num_clean=1, doubt=0.5) == sorted(
        chances, key=lambda outcome: -chances[outcome]
    )


def test_a_token_that_is_certain_stays_so() -> None:
    places = [Place((1, 2), (1.0, 1e-12)), Place((7,), (1.0,))]
    for doubt in (0.01, 1.0, 3.0):
        assert likely_outcomes([1], places, 2, num_clean=1, doubt=doubt) == [
            Outcome(1, 7),
            Outcome(0, 2),
        ]


def test_doubt_is_learned_from_verdicts() -> None:
    greedy, sampled = Doubt(), Doubt()
    assert greedy.weight == 1.0
    for round_id in range(60):
        greedy.learn([0.5], 1, 1)
        sampled.learn([0.5], round_id % 2, 1)
    assert greedy.weight < 0.01
    assert sampled.weight == pytest.approx((30 + PRIOR) / (60 * math.log(2) + PRIOR))


@pytest.mark.parametrize(
    ("kept", "seen", "expected", "rejected"),
    [(0, 3, 0.5, 1), (1, 3, 0.75, 1), (3, 3, 0.875, 0), (2, 2, 0.75, 0), (0, 0, 0.0, 0)],
)
def test_tokens_behind_a_rejection_or_not_decided_yet_teach_nothing(
    kept: int, seen: int, expected: float, rejected: int
) -> None:
    doubt = Doubt()
    doubt.learn([math.exp(-0.5), math.exp(-0.25), math.exp(-0.125)], kept, seen)
    assert doubt.weight == pytest.approx((PRIOR + rejected) / (PRIOR + expected))
    doubt.learn([0.0], 0, 1)
    assert math.isfinite(doubt.weight)
