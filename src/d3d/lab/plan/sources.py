"""Sources of costs: a measured profile, or a data sheet."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from d3d.errors import InvalidRequest
from d3d.lab.plan.costs import ONE_DEVICE, Contention, Costs, ThinnedDraft
from d3d.lab.plan.plan import Scenario, fastest_rows
from d3d.lab.plan.profile import Profile, ProfileCosts, read_profile, thinned_factor
from d3d.lab.plan.roofline import Efficiency, RooflineCosts, find_data_sheet, find_model
from d3d.lab.plan.trace import Trace
from d3d.methods.async_.config import DEFAULT_OUTCOMES

SHARES_OF_LAYERS = (0.875, 0.75, 0.5)
"""Thinner drafters to try: an eighth less, a quarter, a half."""


OF_DATASHEET = {
    "devices": "--devices",
    "target": "--target",
    "drafter": "--drafter",
    "reached": "--bandwidth-share, --arithmetic-share, --overhead-ms, --switch-ms",
}
OF_PROFILE = {"dtype": "--dtype", "threads": "--threads"}
"""Fields that mean nothing with the other source, and their options."""


@dataclass(frozen=True)
class CostSource:
    """A user's choice of either a profile or a data sheet."""

    profile: Path | None = None
    datasheet: str | None = None
    devices: int = 2
    target: str = "qwen3-8b"
    drafter: str = "d3d-8b"
    reached: Efficiency = field(default_factory=Efficiency)
    kept_layers: int | None = None
    dtype: str | None = None
    threads: int | None = None

    def check(self) -> None:
        """Raises InvalidRequest for an impossible choice."""
        if (self.profile is None) == (self.datasheet is None):
            raise InvalidRequest(
                "give --profile FILE, as d3d profile writes it, or --datasheet NAME, one of the two"
            )
        unused, source = OF_DATASHEET, "--datasheet"
        if self.profile is None:
            unused, source = OF_PROFILE, "--profile"
        for name, options in unused.items():
            if getattr(self, name) != getattr(CostSource(), name):
                raise InvalidRequest(f"{options}: for {source} only; leave it out")
        self.thinner()
        if self.profile is None:
            self._computed()

    @property
    def title(self) -> str:
        if self.profile is not None:
            measured = self._profile
            drafter = "no drafter" if measured.drafter is None else measured.drafter.name
            return f"{measured.target.name}, {drafter}, from the profile of {measured.date[:10]}"
        costs = self._computed()
        drafter = "" if costs.drafter is None else f", {costs.drafter.name}"
        devices = f"{costs.num_devices} {costs.device.name}"
        return f"{costs.target.name}{drafter}, {devices}, from data sheets"

    def thinner(self) -> list[tuple[int, float]]:
        """Fewer layers for the drafter, and the cost of its passes over their cost now."""
        if self.profile is None:
            shape = find_model(self.drafter)
            layers = shape.num_layers if self.kept_layers is None else self.kept_layers
            return _fewer(layers, lambda kept: shape.thinned(kept).read_parameters)
        facts = self._profile.drafter
        if facts is None:
            return []
        layers = facts.num_layers if self.kept_layers is None else self.kept_layers
        return _fewer(layers, lambda kept: thinned_factor(facts, kept))

    def scenario(
        self,
        trace: Trace,
        *,
        outcomes: int | None = None,
        hit_rate: float | None = None,
        rows: int | None = None,
    ) -> Scenario:
        """The trace on these devices. None: the default, what the trace tells, or the preset's rows
        and otherwise the fastest."""
        costs, contention, second_device = self._costs(trace)
        if rows is None and self.profile is not None:
            rows = self._profile.target.fused_rows
        return Scenario(
            costs,
            trace,
            DEFAULT_OUTCOMES if outcomes is None else outcomes,
            contention,
            hit_rate,
            fastest_rows(costs, trace) if rows is None else rows,
            second_device,
        )

    def _costs(self, trace: Trace) -> tuple[Costs, Contention, bool]:
        if self.profile is None:
            computed = self._computed()
            return computed, computed.contention, computed.num_devices > 1
        recorded = trace.measured
        dtype = recorded.dtype if self.dtype is None and recorded else self.dtype
        threads = recorded.threads if self.threads is None and recorded else self.threads
        measured = ProfileCosts(self._profile.run(dtype, threads))
        contention = measured.contention() or ONE_DEVICE  # assume the worst if it is unknown
        if self.kept_layers is None or self._profile.drafter is None:
            return measured, contention, False
        factor = thinned_factor(self._profile.drafter, self.kept_layers)
        return ThinnedDraft(measured, factor), contention, False

    @cached_property
    def _profile(self) -> Profile:
        assert self.profile is not None
        return read_profile(self.profile)

    def _computed(self) -> RooflineCosts:
        assert self.datasheet is not None
        drafter = find_model(self.drafter)
        if self.kept_layers is not None:
            drafter = drafter.thinned(self.kept_layers)
        device = find_data_sheet(self.datasheet)
        return RooflineCosts(find_model(self.target), drafter, device, self.devices, self.reached)


def _fewer(now: int, cost: Callable[[int], float]) -> list[tuple[int, float]]:
    whole = cost(now)
    fewer = dict.fromkeys(round(now * share) for share in SHARES_OF_LAYERS)
    return [(kept, cost(kept) / whole) for kept in fewer if 1 <= kept < now]
