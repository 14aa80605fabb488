"""The model against what was measured: would it have said what a run took?"""

from __future__ import annotations

from dataclasses import dataclass

from d3d.errors import InvalidRequest
from d3d.lab.plan.costs import APART, Contention, Costs
from d3d.lab.plan.hits import hit_rates
from d3d.lab.plan.simulate import Modelled, asynchronous, fused, plain, serial
from d3d.lab.plan.trace import Trace
from d3d.methods.async_.config import DEFAULT_OUTCOMES

MODELLED_MODES = ("plain", "serial", "fused", "async")

TOLERANCE = 0.1
"""Largest relative error of a model that may be believed."""


@dataclass(frozen=True)
class Checked:
    """One run, predicted from the verdicts of its rounds alone. Seconds per token after the
    first."""

    source: str
    mode: str
    draft_length: int
    tokens: int
    predicted_s: float
    measured_s: float
    fallbacks: int = 0
    """Rounds that had to do without a draft; what they waited is in the measured time only."""

    @property
    def error(self) -> float:
        """Relative; above 0 where the model is too slow."""
        return self.predicted_s / self.measured_s - 1

    @property
    def within(self) -> bool:
        return abs(self.error) <= TOLERANCE


@dataclass(frozen=True)
class Assumed:
    """What rounds do not say about how they were made."""

    fused_rows: int | None = None
    outcomes: int = DEFAULT_OUTCOMES
    contention: Contention = APART
    hit_rate: float | None = None


def check(trace: Trace, costs: Costs, assumed: Assumed) -> Checked:
    """Raises InvalidRequest for a trace without times, and for one that can't be modelled."""
    if trace.measured is None:
        raise InvalidRequest(
            f"{trace.source}: it holds no times to compare with; give a trace or results with times"
        )
    predicted = _predict(trace, costs, assumed).tpot_s
    told = trace.measured
    return Checked(
        trace.source,
        trace.mode,
        trace.draft_length,
        told.tokens,
        predicted,
        told.tpot_s,
        trace.fallbacks,
    )


def _predict(trace: Trace, costs: Costs, assumed: Assumed) -> Modelled:
    if trace.mode == "plain":
        return plain(trace.rounds, costs)
    if trace.mode == "serial":
        return serial(trace.rounds, costs)
    if trace.mode == "fused":
        if assumed.fused_rows is None and any(one.num_slots is None for one in trace.rounds):
            raise InvalidRequest(
                f"{trace.source}: fused rounds don't say how many rows their passes had; give --rows"
            )
        return fused(trace.rounds, costs, assumed.fused_rows or 0)
    if trace.mode == "async":
        told = (
            ((assumed.hit_rate,), "")
            if assumed.hit_rate is not None
            else hit_rates(trace, assumed.outcomes)
        )
        if told is None:
            raise InvalidRequest(
                f"{trace.source}: async rounds that don't say which of them were hits; give --hit-rate"
            )
        return asynchronous(trace.rounds, costs, assumed.outcomes, told[0], assumed.contention)
    raise InvalidRequest(
        f"{trace.source}: mode {trace.mode!r} is not modelled; {', '.join(MODELLED_MODES)} are"
    )
