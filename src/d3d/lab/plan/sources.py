"""Where costs come from: a profile that was measured, or a device's data sheet."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from d3d.errors import InvalidRequest
from d3d.lab.plan.check import Assumed
from d3d.lab.plan.costs import ONE_DEVICE, Contention, Costs, ThinnedDraft
from d3d.lab.plan.devices import find_device, find_model
from d3d.lab.plan.measured_costs import MeasuredCosts, thinned_factor
from d3d.lab.plan.plan import Setup, fastest_rows
from d3d.lab.plan.profile import Profile, read_profile
from d3d.lab.plan.roofline import Efficiency, RooflineCosts
from d3d.lab.plan.trace import Trace


@dataclass(frozen=True)
class CostSource:
    """A user's choice; `profile` and `device` exclude each other."""

    profile: Path | None
    device: str | None
    devices: int
    target: str
    drafter: str
    reached: Efficiency
    kept_layers: int | None = None
    dtype: str | None = None
    threads: int | None = None

    def check(self) -> None:
        """Raises InvalidRequest for a choice that can't be."""
        if (self.profile is None) == (self.device is None):
            raise InvalidRequest(
                "give --profile FILE, as d3d profile writes it, or --device NAME, one of the two"
            )
        self.thinner()
        if self._profile is None:
            self._computed()

    @property
    def title(self) -> str:
        if self._profile is not None:
            about = self._profile
            drafter = "no drafter" if about.drafter is None else f"{about.drafter.name}"
            return f"{about.target.name}, {drafter}, from the profile of {about.date[:10]}"
        costs = self._computed()
        drafter = "" if costs.drafter is None else f", {costs.drafter.name}"
        return f"{costs.target.name}{drafter}, {costs.num_devices} {costs.device.name}, from data sheets"

    def thinner(self) -> list[tuple[int, float]]:
        """Fewer layers for the drafter, and what is then left of its passes."""
        if self._profile is not None:
            facts = self._profile.drafter
            if facts is None:
                return []
            now = self.kept_layers or facts.num_layers
            whole = thinned_factor(facts, now)
            return [(kept, thinned_factor(facts, kept) / whole) for kept in _fewer(now)]
        shape = find_model(self.drafter).thinned(
            self.kept_layers or find_model(self.drafter).num_layers
        )
        return [
            (kept, shape.thinned(kept).read_parameters / shape.read_parameters)
            for kept in _fewer(shape.num_layers)
        ]

    def setup(
        self, trace: Trace, *, outcomes: int, hit_rate: float | None, rows: int | None
    ) -> Setup:
        """For `d3d plan`: how it would be on these devices."""
        costs, contention, second = self._costs(trace)
        return Setup(
            costs,
            trace,
            outcomes,
            contention,
            hit_rate,
            self._rows(rows) or fastest_rows(costs, trace),
            second,
        )

    def assumed(
        self, trace: Trace, *, outcomes: int, hit_rate: float | None, rows: int | None
    ) -> tuple[Costs, Assumed]:
        """For a comparison with what was measured on this machine."""
        costs, contention, _ = self._costs(trace)
        return costs, Assumed(self._rows(rows), outcomes, contention, hit_rate)

    def _rows(self, rows: int | None) -> int | None:
        return (
            self._profile.target.fused_rows if rows is None and self._profile is not None else rows
        )

    def _costs(self, trace: Trace) -> tuple[Costs, Contention, bool]:
        if self._profile is None:
            computed = self._computed()
            return computed, computed.contention, computed.num_devices > 1
        told = trace.measured
        dtype = self.dtype or (told.dtype if told else None)
        threads = self.threads or (told.threads if told else None)
        measured = MeasuredCosts(self._profile.run(dtype, threads))
        contention = measured.contention()
        costs: Costs = measured
        if self.kept_layers is not None and self._profile.drafter is not None:
            costs = ThinnedDraft(measured, thinned_factor(self._profile.drafter, self.kept_layers))
        return (
            costs,
            contention or ONE_DEVICE,
            False,
        )  # what was not measured is taken for the worst

    @cached_property
    def _profile(self) -> Profile | None:
        return None if self.profile is None else read_profile(self.profile)

    def _computed(self) -> RooflineCosts:
        assert self.device is not None
        drafter = find_model(self.drafter)
        if self.kept_layers is not None:
            drafter = drafter.thinned(self.kept_layers)
        return RooflineCosts(
            find_model(self.target), drafter, find_device(self.device), self.devices, self.reached
        )


def _fewer(num_layers: int) -> Iterator[int]:
    """Some thinner ones: an eighth less, a quarter, a half."""
    yield from dict.fromkeys(
        kept
        for share in (0.875, 0.75, 0.5)
        if 1 <= (kept := round(num_layers * share)) < num_layers
    )
