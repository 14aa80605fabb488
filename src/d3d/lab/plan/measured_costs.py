"""Costs of passes read off a profile: medians, and straight lines between them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from d3d.errors import InvalidRequest
from d3d.lab.plan.costs import Contention, interpolate
from d3d.lab.plan.profile import Facts, Kind, Point, Run

ASYNC_KINDS: tuple[Kind, ...] = ("async_verify", "async_packed", "async_draft")
"""What is measured of async mode as it is."""


@dataclass(frozen=True)
class MeasuredCosts:
    """One run of a profile."""

    run: Run

    @cached_property
    def _points(self) -> dict[Kind, list[Point]]:
        found: dict[Kind, list[Point]] = {}
        for one in self.run.points:
            found.setdefault(one.kind, []).append(one)
        return found

    @property
    def has_drafter(self) -> bool:
        return "draft" in self._points

    @property
    def has_fused(self) -> bool:
        return "fused" in self._points

    @property
    def has_own_cache(self) -> bool:
        return self.run.memory.drafter_cache_per_token > 0

    @property
    def switch_s(self) -> float:
        return self._single("switch")

    @property
    def rest_s(self) -> float:
        return self._single("rest")

    def verify(self, rows: int, context: float) -> float:
        return self._at("verify", rows, context)

    def draft(self, draft_length: int, context: float) -> float:
        return self._at("draft", draft_length, context)

    def packed(self, draft_length: int, outcomes: int, context: float) -> float:
        """Over the draft lengths that were measured it is interpolated too."""
        lengths = sorted({one.draft_length for one in self._of("packed")})
        return interpolate(
            [(float(length), self._at("packed", outcomes, context, length)) for length in lengths],
            draft_length,
        )

    def fused(self, rows: int, context: float) -> float:
        return self._at("fused", rows, context)

    def read(self, context: float) -> float:
        line = sorted(
            (float(one.context), one.median_s) for one in self._points.get("async_read", ())
        )
        return interpolate(line, context) if line else 0.0

    def contention(self) -> Contention | None:
        """What async mode costs both sides on this machine; None where it was not measured.

        Each pass as it was in async mode over the same pass alone. What it has in async mode is
        less than what it has alone: of the threads, for all of a request, and of the memory's
        bandwidth, while the other side's pass runs too."""
        measured = {kind: points[0] for kind in ASYNC_KINDS if (points := self._points.get(kind))}
        if not measured.keys() >= {"async_verify", "async_packed"}:
            return None
        verify, packed, draft = (measured.get(kind) for kind in ASYNC_KINDS)
        assert verify is not None
        assert packed is not None
        slower = (
            verify.median_s / self.verify(verify.size, verify.context),
            packed.median_s / self.packed(packed.draft_length, packed.size, packed.context),
            draft.median_s / self.draft(draft.size, draft.context) if draft is not None else 1.0,
        )
        return Contention(*slower, lasting=True)

    def _of(self, kind: Kind) -> list[Point]:
        points = self._points.get(kind)
        if not points:
            what = "the profile holds none; measure it again with a drafter that can do it"
            raise InvalidRequest(f"{kind}: nothing is known of such a pass: {what}")
        return points

    def _single(self, kind: Kind) -> float:
        points = self._points.get(kind)
        return points[0].median_s if points else 0.0

    def _at(self, kind: Kind, size: int, context: float, draft_length: int = 0) -> float:
        """Between sizes at each context, then between contexts."""
        if size < 1:
            raise InvalidRequest(f"{kind}: a pass of {size} can't be")
        self._of(kind)
        lines = self._lines[kind, draft_length]
        return interpolate(
            [(float(known), interpolate(line, size)) for known, line in lines], context
        )

    @cached_property
    def _lines(self) -> dict[tuple[Kind, int], list[tuple[int, list[tuple[float, float]]]]]:
        """By kind and draft length: contexts, ascending, and at each of them the times by size."""
        found: dict[tuple[Kind, int], dict[int, list[tuple[float, float]]]] = {}
        for one in self.run.points:
            found.setdefault((one.kind, one.draft_length), {}).setdefault(one.context, []).append(
                (one.size, one.median_s)
            )
        return {
            key: [(context, sorted(line)) for context, line in sorted(lines.items())]
            for key, lines in found.items()
        }


def thinned_factor(drafter: Facts, num_layers: int) -> float:
    """What is left of a drafter's pass with only so many of its layers. Raises InvalidRequest."""
    if not 1 <= num_layers <= drafter.num_layers:
        raise InvalidRequest(
            f"layers: {num_layers} is not within 1 and those of {drafter.name}, {drafter.num_layers}"
        )
    return 1 - drafter.layer_share * (1 - num_layers / drafter.num_layers)
