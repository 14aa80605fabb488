"""Which verdicts are expected, by hand-made probabilities."""

from __future__ import annotations

import itertools

import pytest

from d3d.core.types import Outcome
from d3d.drafting.outcomes import Place, likely_outcomes, within_budget

PLACES = [Place((1, 2, 3), (0.7, 0.2, 0.1)), Place((4, 5, 6), (0.5, 0.4, 0.1)), Place((7, 8), (0.6, 0.4))]


def chance(outcome: Outcome) -> float:
    """Of an outcome of the draft 1, 4 by the definition."""
    reached = [1.0, 0.7, 0.35][outcome.num_accepted]
    return reached * PLACES[outcome.num_accepted].chance(outcome.bonus_token)


def test_the_likeliest_come_first() -> None:
    everything = likely_outcomes([1, 4], PLACES, 100)
    possible = [(k, t) for k, place in enumerate(PLACES) for t in place.token_ids if (k, t) not in ((0, 1), (1, 4))]
    assert sorted(everything) == sorted(possible)
    assert all(chance(a) >= chance(b) for a, b in itertools.pairwise(everything))
    assert sum(map(chance, everything)) == pytest.approx(1.0)
    assert everything[:2] == [Outcome(1, 5), Outcome(2, 7)]


@pytest.mark.parametrize("budget", range(1, 8))
def test_the_budget_holds_and_keeps_the_best(budget: int) -> None:
    assert likely_outcomes([1, 4], PLACES, budget) == likely_outcomes([1, 4], PLACES, 100)[:budget]


def test_a_rejected_token_is_never_its_own_bonus_token() -> None:
    assert all(o.bonus_token != 1 for o in likely_outcomes([1], PLACES[:2], 9) if o.num_accepted == 0)


def test_an_unlikely_whole_draft_is_prepared_for_all_the_same() -> None:
    places = [Place((1, 2, 3), (0.02, 0.5, 0.48)), Place((4,), (1.0,))]
    assert likely_outcomes([1], places, 2) == [Outcome(0, 2), Outcome(1, 4)]
    assert likely_outcomes([1], places, 1) == [Outcome(0, 2)]


@pytest.mark.parametrize("larger", range(1, 8))
def test_a_list_cut_to_a_smaller_budget_is_the_list_of_that_budget(larger: int) -> None:
    unlikely = [Place((1, 2, 3), (0.02, 0.5, 0.48)), Place((4, 5, 6), (0.3, 0.4, 0.3)), Place((7, 8), (0.6, 0.4))]
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
