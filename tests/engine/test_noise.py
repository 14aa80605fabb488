"""Noise is uniform, depends on (seed, position) only, and never changes between versions."""

from __future__ import annotations

import pytest
from scipy import stats

from d3d.engine.noise import fresh_seed, uniform


def test_values_are_pinned() -> None:
    """A changed value would change every seeded answer."""
    assert [uniform(0, 0), uniform(0, 1), uniform(42, 7), uniform(2**64 + 42, 7)] == [
        0.6524484863740322,
        0.7012121095215252,
        0.7347204584623639,
        0.5831616458232195,
    ]


@pytest.mark.parametrize(
    "draws",
    [[uniform(3, i) for i in range(20000)], [uniform(i, 3) for i in range(20000)]],
    ids=["positions", "seeds"],
)
def test_even_along_positions_and_along_seeds(draws: list[float]) -> None:
    assert min(draws) >= 0.0
    assert max(draws) < 1.0
    assert stats.kstest(draws, "uniform").pvalue > 1e-3
    assert abs(stats.pearsonr(draws[:-1], draws[1:]).statistic) < 0.03


def test_neighbouring_seeds_are_independent() -> None:
    first, second = ([uniform(seed, i) for i in range(20000)] for seed in (5, 6))
    assert abs(stats.pearsonr(first, second).statistic) < 0.03
    assert len({*first, *second}) == 40000


def test_all_bits_of_a_long_seed_count() -> None:
    assert len({uniform(seed, 0) for seed in (1, 2**63, 2**64, 2**64 + 1, 2**200, 2**200 + 1)}) == 6


@pytest.mark.parametrize(("seed", "position"), [(-1, 0), (0, -1)])
def test_negative_numbers_are_refused(seed: int, position: int) -> None:
    with pytest.raises(ValueError, match="must not be negative"):
        uniform(seed, position)


def test_fresh_seeds_differ_and_survive_json() -> None:
    seeds = {fresh_seed() for _ in range(100)}
    assert len(seeds) == 100
    assert all(0 <= seed < 2**53 for seed in seeds)
