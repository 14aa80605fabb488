"""Ratios of totals over answers, with 95 % intervals by the percentile bootstrap."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

DRAWS = 2000
QUANTILES = (0.025, 0.975)

Totals = Sequence[tuple[float, float]]
"""Numerator and denominator of each answer."""
_Array = npt.NDArray[np.float64]


class Interval(NamedTuple):
    """A figure and its 95 % interval."""

    value: float
    low: float
    high: float


def paired_ratio(own: Totals, other: Totals, *, seed: int = 0) -> Interval:
    """`other`'s ratio / `own`'s, over answers to the same prompts in the same order: of seconds and
    tokens, how many times as fast `own` is.

    Pairs are resampled, so what makes a prompt slow for both cancels out."""
    table = np.hstack([np.asarray(own, dtype=float), np.asarray(other, dtype=float)])
    drawn = _resampled(table, np.random.default_rng(seed))
    sums = np.vstack([table.sum(axis=0), drawn])
    return _interval(_ratios(sums[:, 2:]) / _ratios(sums[:, :2]))


def unpaired_ratio(new: Totals, old: Totals, *, seed: int = 0) -> Interval:
    """`new`'s ratio / `old`'s, over answers to different prompts."""
    generator = np.random.default_rng(seed)
    tables = [np.asarray(totals, dtype=float) for totals in (new, old)]
    ratios = [
        _ratios(np.vstack([table.sum(axis=0), _resampled(table, generator)])) for table in tables
    ]
    return _interval(ratios[0] / ratios[1])


def _resampled(table: _Array, generator: np.random.Generator) -> _Array:
    """Column sums of DRAWS resamples of the rows, [DRAWS, columns]."""
    rows = generator.integers(len(table), size=(DRAWS, len(table)))
    sums: _Array = table[rows].sum(axis=1)
    return sums


def _ratios(sums: _Array) -> _Array:
    return np.divide(sums[:, 0], sums[:, 1])


def _interval(ratios: _Array) -> Interval:
    """The first is the figure, the others come from resamples."""
    low, high = np.quantile(ratios[1:], QUANTILES)
    return Interval(float(ratios[0]), float(low), float(high))
