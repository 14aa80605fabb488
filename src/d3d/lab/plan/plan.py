"""The model of rounds applied to every mode, and to changes that might pay."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from d3d.engine.metrics import ratio
from d3d.errors import InvalidRequest
from d3d.lab.plan.costs import APART, Contention, Costs, ThinnedDraft
from d3d.lab.plan.estimates import fused_rounds, hit_rates
from d3d.lab.plan.simulate import Modelled, asynchronous, fused, plain, serial
from d3d.lab.plan.trace import Trace
from d3d.methods.async_.config import DEFAULT_OUTCOMES
from d3d.methods.async_.outcomes import MOST_OUTCOMES
from d3d.methods.base import MOST_TOKENS
from d3d.methods.fused.rows import BUDGETS as ROW_BUDGETS

LEAST_GAIN = 0.01
"""Changes that gain less are not advised."""

LENGTHS = (*range(1, 33), 48, 64, 96, 128, 192, 256, 384, 512, 768)
"""Draft lengths to try."""

OUTCOME_BUDGETS = (1, 2, 4, 8, 16, 32, 64)


@dataclass(frozen=True)
class Scenario:
    """Rounds, the costs of their passes, and how modes are set up."""

    costs: Costs
    trace: Trace
    outcomes: int = DEFAULT_OUTCOMES
    contention: Contention = APART
    """Contention of async mode on the devices at hand."""
    hit_rate: float | None = None
    """Instead of what the trace tells."""
    fused_rows: int | None = None
    second_device: bool = False
    """True if the drafter has a device of its own."""

    def __post_init__(self) -> None:
        """Raises InvalidRequest."""
        if not 1 <= self.outcomes <= MOST_OUTCOMES:
            raise InvalidRequest(f"outcomes: {self.outcomes} is not within 1 and {MOST_OUTCOMES}")
        if self.hit_rate is not None and not 0 <= self.hit_rate <= 1:
            raise InvalidRequest(f"hit rate: {self.hit_rate:g} is not within 0 and 1")
        if self.fused_rows is not None and not 2 <= self.fused_rows <= MOST_TOKENS:
            raise InvalidRequest(
                f"rows: {self.fused_rows} is not within 2 (the anchor and a slot) and {MOST_TOKENS}"
            )

    @property
    def hit_rates(self) -> tuple[tuple[float, ...], str] | None:
        """Hit rates after 0, 1, ... kept tokens, and their origin; None if unknown."""
        if self.hit_rate is not None:
            return (self.hit_rate,), "as given"
        return hit_rates(self.trace, self.outcomes)


@dataclass(frozen=True)
class Option:
    """A mode, modelled."""

    label: str
    modelled: Modelled
    note: str = ""

    @property
    def tpot_s(self) -> float:
        return self.modelled.tpot_s


def options(scenario: Scenario) -> list[Option]:
    """Plain first, then the modes that the costs and the trace allow."""
    rounds, costs = scenario.trace.rounds, scenario.costs
    listed = [Option("plain", plain(rounds, costs))]
    if not costs.has_drafter or scenario.trace.draft_length < 1:
        return listed
    if scenario.trace.mode != "fused":
        listed.append(Option(f"serial {scenario.trace.draft_length}", serial(rounds, costs)))
        listed += _async(scenario)
    if costs.has_fused and scenario.fused_rows is not None:
        listed.append(_fused(scenario, scenario.fused_rows))
    return listed


def _async(scenario: Scenario) -> Iterator[Option]:
    """At the known hit rate; if there is none, at both ends of its range."""
    known = scenario.hit_rates
    ends = [((1.0,), "if every successor were there"), ((0.0,), "if none were")]
    for rates, origin in [known] if known is not None else ends:
        rounds = scenario.trace.rounds
        if origin != "recorded":  # the recorded hits of single rounds hold for their own run only
            rounds = tuple(
                traced._replace(record=traced.record._replace(preparation=None))
                for traced in rounds
            )
        modelled = asynchronous(
            rounds, scenario.costs, scenario.outcomes, rates, scenario.contention
        )
        label = f"async {scenario.trace.draft_length}, {scenario.outcomes} outcomes"
        yield Option(label, modelled, f"hits {origin}, hit rate {modelled.hit_rate or 0:.2f}")


def _fused(scenario: Scenario, rows: int) -> Option:
    label = f"fused, {rows} rows"
    if scenario.trace.mode == "fused":
        return Option(label, fused(scenario.trace.rounds, scenario.costs, rows))
    modelled = fused(fused_rounds(scenario.trace, rows), scenario.costs, rows)
    return Option(label, modelled, "acceptance estimated from serial rounds")


def fastest_rows(costs: Costs, trace: Trace) -> int | None:
    """Rows of the fastest fused pass, among the budgets that fused mode itself tries. None without
    fused mode, and for fused rounds, which had their own."""
    if not costs.has_fused or trace.mode == "fused" or trace.draft_length < 1:
        return None
    return min(ROW_BUDGETS, key=lambda rows: fused(fused_rounds(trace, rows), costs, rows).tpot_s)


def best(scenario: Scenario) -> Option:
    return min(options(scenario), key=lambda option: option.tpot_s)


@dataclass(frozen=True)
class Advice:
    """A change and its effect."""

    change: str
    option: Option
    gain: float
    """Times as fast as the best option without the change."""
    proviso: str = ""


def advice(scenario: Scenario, layers: Sequence[tuple[int, float]] = ()) -> list[Advice]:
    """Changes that would save time, the best first. layers: (layers left in the drafter, cost of
    its passes over their cost now)."""
    now = best(scenario)
    changes = []
    for change, changed, proviso in _changes(scenario, layers, now):
        option = best(changed)
        gain = ratio(now.tpot_s, option.tpot_s)
        if gain > 1 + LEAST_GAIN and (not proviso or option.label != "plain"):
            changes.append(Advice(change, option, gain, proviso))
    return sorted(_best_of_kind(changes), key=lambda change: -change.gain)


def _changes(
    scenario: Scenario, layers: Sequence[tuple[int, float]], now: Option
) -> Iterator[tuple[str, Scenario, str]]:
    """Each change, what it makes of the scenario, and its proviso."""
    trace = scenario.trace
    if scenario.costs.has_drafter and trace.mode != "fused":
        for length in itertools.takewhile(lambda length: length < trace.draft_length, LENGTHS):
            shorter = replace(scenario, trace=trace.shortened(length))
            yield f"draft {length} tokens a round", shorter, ""
    if scenario.hit_rate is None and (trace.recall or trace.hits_by_budget):
        for budget in OUTCOME_BUDGETS:
            if budget != scenario.outcomes:
                yield f"prepare {budget} outcomes", replace(scenario, outcomes=budget), ""
    if not scenario.second_device:
        apart = replace(scenario, contention=APART, second_device=True)
        yield "give the drafter a second device like this one", apart, ""
    for kept, factor in layers:
        thin = replace(scenario, costs=ThinnedDraft(scenario.costs, factor))
        yield f"keep {kept} of the drafter's layers", thin, _proviso(thin, now)


def _best_of_kind(changes: Iterable[Advice]) -> Iterable[Advice]:
    """The best of each kind of change; all numbers of layers, since each costs another amount of
    acceptance."""
    kinds: dict[str, Advice] = {}
    for change in changes:
        kind = change.change if change.proviso else change.change.split()[0]
        if kind not in kinds or change.gain > kinds[kind].gain:
            kinds[kind] = change
    return kinds.values()


def _proviso(thin: Scenario, now: Option) -> str:
    """The acceptance length down to which the thinner drafter is not slower."""
    option = best(thin)
    if option.label == "plain":
        return "plain stays faster"
    least = option.modelled.acceptance_length * ratio(option.tpot_s, now.tpot_s)
    return f"if acceptance length stays above {least:.2f}"
