"""Estimates of acceptance from a prior and observed rounds.

One estimator serves pauses, the rows of a fused pass, copied tokens and the calibration of clean
rows: a ratio of sums, to which the prior contributes some observations."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate


@dataclass
class Estimate:
    """A running ratio observed / possible."""

    prior: float
    weight: float
    """Weight of the prior, in units of `possible`."""
    decay: float = 0.0
    """Share of past observations dropped with each new one; 0 forgets nothing."""
    value: float = field(init=False)
    _possible: float = field(init=False)

    def __post_init__(self) -> None:
        self.value, self._possible = self.prior, self.weight  # the prior itself, without rounding

    def add(self, observed: float, possible: float = 1.0) -> None:
        self._possible = (1.0 - self.decay) * self._possible + possible
        self.value += (observed - possible * self.value) / self._possible


class Survival:
    """Probabilities that at least the first 1, 2, ... tokens of a request's drafts are kept."""

    def __init__(self, draft_length: int, prior: float, weight: float) -> None:
        """prior: acceptance probability of a token given that those before it are kept."""
        self._depths = [Estimate(prior ** (depth + 1), weight) for depth in range(draft_length)]

    def add(self, num_drafted: int, num_accepted: int) -> None:
        for depth in range(num_drafted):
            self._depths[depth].add(depth < num_accepted)

    @property
    def shares(self) -> list[float]:
        """Survival probabilities, [draft_length], descending."""
        return list(accumulate((depth.value for depth in self._depths), min))
