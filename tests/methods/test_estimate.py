"""The one estimator against the formulas that each of its uses had before."""

from __future__ import annotations

import random

import pytest

from d3d.methods.estimate import Estimate, Survival
from d3d.methods.serial.drafter import NEWEST_SHARE, PRIOR_KEPT, DraftHistory


def test_before_anything_is_seen_it_is_the_prior() -> None:
    assert Estimate(0.65, 4).value == pytest.approx(0.65)
    assert Estimate(2.0, 5, decay=0.2).value == pytest.approx(2.0)


@pytest.mark.parametrize("seed", range(5))
def test_without_decay_it_is_a_ratio_of_sums_with_the_prior_as_observations(seed: int) -> None:
    draw = random.Random(seed)
    estimate = Estimate(0.75, 4)
    kept, judged = 4 * 0.75, 4.0
    for _ in range(50):
        possible = draw.randint(0, 5)
        observed = draw.randint(0, possible)
        estimate.add(observed, possible)
        kept, judged = kept + observed, judged + possible
        assert estimate.value == pytest.approx(kept / judged)


@pytest.mark.parametrize("seed", range(5))
def test_a_pauses_mean_is_a_running_one_with_a_weight_for_the_newest(seed: int) -> None:
    draw = random.Random(seed)
    history = DraftHistory(0.8)
    mean = PRIOR_KEPT
    assert history.kept.value == pytest.approx(mean)
    for _ in range(100):
        newest = draw.randint(0, 6)
        history.kept.add(newest)
        mean += NEWEST_SHARE * (newest - mean)
        assert history.kept.value == pytest.approx(mean)


@pytest.mark.parametrize("least_kept", [0.0, 0.8, 2.0, 7.0])
def test_a_higher_threshold_is_met_at_first_too(least_kept: float) -> None:
    history = DraftHistory(least_kept)
    assert history.kept.value == pytest.approx(max(PRIOR_KEPT, least_kept))
    assert history.begin_round()


def test_a_threshold_that_the_prior_just_meets_is_met() -> None:
    """Rounding in the ratio must not decide the first round."""
    for hundredths in range(200, 900):
        assert DraftHistory(hundredths / 100).begin_round(), hundredths


@pytest.mark.parametrize("seed", range(5))
def test_survival_is_the_share_by_depth_made_to_fall(seed: int) -> None:
    draw = random.Random(seed)
    survival = Survival(6, 0.65, 4)
    assert survival.shares == pytest.approx([0.65 ** (depth + 1) for depth in range(6)])
    drafted = [4.0] * 6
    kept = [4 * 0.65 ** (depth + 1) for depth in range(6)]
    for _ in range(60):
        num_drafted = draw.randint(0, 6)
        num_accepted = draw.randint(0, num_drafted)
        survival.add(num_drafted, num_accepted)
        for depth in range(num_drafted):
            drafted[depth] += 1
            kept[depth] += depth < num_accepted
        shares = [a / b for a, b in zip(kept, drafted, strict=True)]
        expected = [min(shares[: depth + 1]) for depth in range(6)]
        assert survival.shares == pytest.approx(expected)
        assert survival.shares == sorted(survival.shares, reverse=True)
