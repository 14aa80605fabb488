"""Figures of rounds: by hand, against their definitions, and if there is nothing to divide by."""

from __future__ import annotations

import random

import pytest

from d3d.engine import metrics
from d3d.engine.round import Preparation, Round

ROUNDS = [
    Round(4, 4, 5, 0.0, 0.1),
    Round(4, 0, 1, 0.0, 0.1),
    Round(0, 0, 1, 0.0, 0.1),
    Round(4, 2, 3, 0.0, 0.1),
    Round(2, 2, 2, 0.0, 0.1),  # cut by a stop: no bonus token
]


def test_figures_by_hand() -> None:
    assert metrics.acceptance_length(ROUNDS) == 12 / 5
    assert metrics.acceptance_length(iter(ROUNDS)) == 12 / 5
    assert metrics.acceptance_length_drafted(ROUNDS) == 11 / 4
    assert metrics.acceptance_rate(ROUNDS) == 8 / 14
    assert metrics.accepted_per_round(ROUNDS) == 8 / 5
    counts = metrics.histogram(ROUNDS, 4)
    assert counts == (2, 0, 2, 0, 1)
    assert metrics.acceptance_at(counts) == (3 / 5, 3 / 5, 1 / 5, 1 / 5)


def test_nothing_to_divide_by_is_zero_or_none() -> None:
    assert metrics.ratio(3, 0) == 0.0
    assert metrics.ratio(3, 4) == 0.75
    for figure in (
        metrics.acceptance_length,
        metrics.acceptance_length_drafted,
        metrics.acceptance_rate,
        metrics.accepted_per_round,
    ):
        assert figure([]) == 0.0
    assert metrics.acceptance_rate([ROUNDS[2]]) == 0.0
    assert metrics.histogram([], 3) == (0, 0, 0, 0)
    assert metrics.acceptance_at((0, 0, 0)) == (0.0, 0.0)
    assert metrics.hit_rate([]) is None
    assert metrics.hit_rate(ROUNDS) is None
    assert metrics.tpot_s(1.0, 1.0, 1) is None
    assert metrics.tpot_s(1.0, 0.0, 0) is None


@pytest.mark.parametrize("seed", range(20))
def test_they_agree_with_each_other(seed: int) -> None:
    """The acceptance length is 1 + the sum of the shares by position, unless stops cut rounds."""
    draw = random.Random(seed)
    rounds = []
    for _ in range(draw.randint(1, 40)):
        drafted = draw.randint(0, 6)
        accepted = draw.randint(0, drafted)
        rounds.append(Round(drafted, accepted, accepted + 1, 0.0, 0.1))
    counts = metrics.histogram(rounds, 6)
    assert sum(counts) == len(rounds)
    shares = metrics.acceptance_at(counts)
    assert list(shares) == sorted(shares, reverse=True)
    assert metrics.acceptance_length(rounds) == pytest.approx(1 + sum(shares))
    assert metrics.accepted_per_round(rounds) == pytest.approx(sum(shares))
    share = sum(r.num_accepted for r in rounds) / max(1, sum(r.draft_length for r in rounds))
    assert metrics.acceptance_rate(rounds) == pytest.approx(share)


def test_the_hit_rate_leaves_out_the_first_round_and_those_that_wanted_no_draft() -> None:
    def prepared(readiness: str) -> Round:
        return Round(4, 1, 2, 0.0, 0.1, preparation=Preparation(readiness))  # type: ignore[arg-type]

    assert metrics.hit_rate([prepared("unprepared")]) is None
    assert metrics.hit_rate([prepared("unprepared"), prepared("hit")]) == 1.0
    several = ["unprepared", "hit", "miss", "late", "hit", "unprepared"]
    first = [*map(prepared, several), ROUNDS[2]]
    assert metrics.hit_rate(first) == 2 / 5
    assert metrics.hit_rate(first, [], list(map(prepared, ["miss", "hit"]))) == 3 / 6


def test_seconds_per_further_token() -> None:
    assert metrics.tpot_s(2.5, 0.5, 5) == 0.5
    assert metrics.tpot_s(2.5, 0.5, 2) == 2.0
