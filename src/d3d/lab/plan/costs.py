"""Costs of the passes of a round: the input of the model of rounds."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol


class Contention(NamedTuple):
    """Slow-down factors of passes while target and drafter both run; 1 if they share nothing."""

    verify: float = 1.0
    draft: float = 1.0
    """Factor for preparing successors."""
    fresh: float = 1.0
    """Factor for a draft that the target waits for."""
    lasting: bool = False
    """True if a pass is slower from start to end, as with threads of its own; otherwise it is
    slower only while the other side's pass runs."""


APART = Contention()
"""Two devices that share nothing."""

ONE_DEVICE = Contention(2.0, 2.0)
"""Both passes need all of one device's memory bandwidth: each runs at half speed, so nothing is
hidden."""


class Costs(Protocol):
    """Seconds of the passes of one sequence, each on an otherwise idle device.

    context: committed tokens before the pass. Raises InvalidRequest for a pass of unknown cost."""

    @property
    def has_drafter(self) -> bool: ...

    @property
    def has_fused(self) -> bool: ...

    @property
    def has_own_cache(self) -> bool:
        """True if the drafter reads the prompt itself in serial mode; in async mode it always
        does."""
        ...

    @property
    def switch_s(self) -> float:
        """From a verdict to the next verification, on a hit."""
        ...

    @property
    def rest_s(self) -> float:
        """Seconds of each round beside draft and verification: text, delivery, the loop."""
        ...

    def verify(self, rows: int, context: float) -> float:
        """The target's pass over the anchor and rows - 1 drafted tokens, up to the commit."""
        ...

    def draft(self, draft_length: int, context: float) -> float: ...

    def packed(self, draft_length: int, outcomes: int, context: float) -> float:
        """Preparing the successors of so many outcomes, each as long as the draft."""
        ...

    def fused(self, rows: int, context: float) -> float: ...

    def read(self, context: float) -> float:
        """A request's first draft, for which the drafter reads the whole text while the target
        waits. 0 if unknown: then it costs as much as any other draft."""
        ...


def interpolate(points: Sequence[tuple[float, float]], x: float) -> float:
    """Piecewise linear through `points` (x ascending, each x once), extrapolated at both ends;
    never below 0."""
    if len(points) == 1:
        return points[0][1]
    place = min(max(bisect_right([known for known, _ in points], x), 1), len(points) - 1)
    (x0, y0), (x1, y1) = points[place - 1], points[place]
    return max(0.0, y0 + (y1 - y0) * (x - x0) / (x1 - x0))


@dataclass(frozen=True)
class ThinnedDraft:
    """Costs with a drafter of fewer layers: its passes shrink with the weights that they read.

    Fused passes stay as they are, since their clean rows go through all of the target's layers."""

    costs: Costs
    factor: float
    """Cost of a drafter's pass over its cost with all layers."""

    @property
    def has_drafter(self) -> bool:
        return self.costs.has_drafter

    @property
    def has_fused(self) -> bool:
        return self.costs.has_fused

    @property
    def has_own_cache(self) -> bool:
        return self.costs.has_own_cache

    @property
    def switch_s(self) -> float:
        return self.costs.switch_s

    @property
    def rest_s(self) -> float:
        return self.costs.rest_s

    def verify(self, rows: int, context: float) -> float:
        return self.costs.verify(rows, context)

    def draft(self, draft_length: int, context: float) -> float:
        return self.factor * self.costs.draft(draft_length, context)

    def packed(self, draft_length: int, outcomes: int, context: float) -> float:
        return self.factor * self.costs.packed(draft_length, outcomes, context)

    def fused(self, rows: int, context: float) -> float:
        return self.costs.fused(rows, context)

    def read(self, context: float) -> float:
        return self.factor * self.costs.read(context)
