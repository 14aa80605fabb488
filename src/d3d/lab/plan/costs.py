"""What the passes of a round cost: the one thing that the model of rounds has to be told."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol


class Contention(NamedTuple):
    """How much longer a pass takes where both sides work; 1 where they have nothing in common."""

    verify: float = 1.0
    draft: float = 1.0
    """Of a preparation."""
    fresh: float = 1.0
    """Of a draft that the target waits for."""
    lasting: bool = False
    """Whether that holds for all of a pass, as where each side has threads of its own for all of a
    request; else only while the other side's pass runs too."""


APART = Contention()
"""Two devices that share nothing."""

ONE_DEVICE = Contention(2.0, 2.0)
"""Two passes that both need all of one device's memory bandwidth: each goes on at half speed, so
nothing is hidden."""


class Costs(Protocol):
    """Seconds of the passes of one sequence, each on a device that does nothing else.

    `context`: committed tokens before the pass. Raises InvalidRequest for a pass of which nothing
    is known."""

    @property
    def has_drafter(self) -> bool: ...

    @property
    def has_fused(self) -> bool: ...

    @property
    def has_own_cache(self) -> bool:
        """Whether the drafter reads the prompt itself in serial mode; in async mode it always
        does."""
        ...

    @property
    def switch_s(self) -> float:
        """From a verdict to the start of the next verification, where its successor lies ready."""
        ...

    @property
    def rest_s(self) -> float:
        """Of each round, beside draft and verification: text, delivery, the loop itself."""
        ...

    def verify(self, rows: int, context: float) -> float:
        """The target's pass over the anchor and rows - 1 drafted tokens, and what follows until
        they are committed."""
        ...

    def draft(self, draft_length: int, context: float) -> float: ...

    def packed(self, draft_length: int, outcomes: int, context: float) -> float:
        """Preparing the successors of so many outcomes of a draft, each as long as that draft."""
        ...

    def fused(self, rows: int, context: float) -> float: ...

    def read(self, context: float) -> float:
        """A request's first draft, for which the drafter reads all of the text, as in async mode;
        the target waits. 0 where nothing is known of it: then it is a draft like any other."""
        ...


def interpolate(points: Sequence[tuple[float, float]], x: float) -> float:
    """Piecewise linear through `points` (x ascending, each x once), the outer pieces going on
    beyond them; never below 0."""
    if len(points) == 1:
        return points[0][1]
    place = min(max(bisect_right([known for known, _ in points], x), 1), len(points) - 1)
    (x0, y0), (x1, y1) = points[place - 1], points[place]
    return max(0.0, y0 + (y1 - y0) * (x - x0) / (x1 - x0))


@dataclass(frozen=True)
class ThinnedDraft:
    """Costs with a drafter of fewer layers: its passes shrink by the share that these layers have
    of its weights.

    An estimate for passes that are bound by reading weights; what does not depend on layers (head,
    previous-token head) stays. A drafter that has fused passes is thinned by the layers of its
    slots: clean rows stay the target's, so fused mode stays, and its passes, which read all the
    target's layers anyway, are taken to cost what they did."""

    costs: Costs
    factor: float
    """What is left of a drafter's pass."""

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
