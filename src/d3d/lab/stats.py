"""Ratios of totals over answers, with 95 % intervals from answers drawn anew with replacement (the
percentile bootstrap)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

DRAWS = 2000
QUANTILES = (0.025, 0.975)

Totals = Sequence[tuple[float, float]]
"""Of each answer: what is divided, and by what."""


class Interval(NamedTuple):
    """A figure and how far it may be off."""

    value: float
    low: float
    high: float


def paired_ratio(own: Totals, other: Totals, *, seed: int = 0) -> Interval:
    """`other`'s ratio over `own`'s, answer by answer the same prompts: of seconds and tokens, how
    many times as fast `own` is.

    What makes a prompt slow for both cancels out, since pairs are drawn."""
    table = np.hstack([np.asarray(own, dtype=float), np.asarray(other, dtype=float)])
    drawn = np.random.default_rng(seed).integers(len(table), size=(DRAWS, len(table)))
    low, high = np.quantile(_of_pairs(table[drawn].sum(axis=1)), QUANTILES)
    return Interval(float(_of_pairs(table.sum(axis=0)[None])[0]), float(low), float(high))


def unpaired_ratio(new: Totals, old: Totals, *, seed: int = 0) -> Interval:
    """`new`'s ratio over `old`'s, of answers to different prompts."""
    generator = np.random.default_rng(seed)
    drawn = [_ratios(_drawn(np.asarray(totals, dtype=float), generator)) for totals in (new, old)]
    value = [_ratios(np.asarray(totals, dtype=float).sum(axis=0)[None])[0] for totals in (new, old)]
    low, high = np.quantile(drawn[0] / drawn[1], QUANTILES)
    return Interval(float(value[0] / value[1]), float(low), float(high))


def _drawn(
    table: npt.NDArray[np.float64], generator: np.random.Generator
) -> npt.NDArray[np.float64]:
    sums: npt.NDArray[np.float64] = table[
        generator.integers(len(table), size=(DRAWS, len(table)))
    ].sum(axis=1)
    return sums


def _ratios(table: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    return np.divide(table[:, 0], table[:, 1])


def _of_pairs(table: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    return np.divide(_ratios(table[:, 2:]), _ratios(table[:, :2]))
