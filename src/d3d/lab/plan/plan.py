"""What each mode would give, and what could be changed: the model of rounds, asked several
questions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from d3d.drafting.fused_budget import BUDGETS as BUDGETS_OF_ROWS
from d3d.errors import InvalidRequest
from d3d.lab.plan.costs import APART, Contention, Costs, ThinnedDraft
from d3d.lab.plan.fused_rounds import fused_rounds
from d3d.lab.plan.hits import hit_rates
from d3d.lab.plan.simulate import Modelled, asynchronous, fused, plain, serial
from d3d.lab.plan.trace import Trace
from d3d.methods.async_.config import DEFAULT_OUTCOMES
from d3d.methods.async_.outcomes import MOST_OUTCOMES

WORTH = 0.01
"""Least share of the time that a change must save to be advised."""

BUDGETS = (1, 2, 4, 8, 16, 32, 64)


@dataclass(frozen=True)
class Setup:
    """What is modelled."""

    costs: Costs
    trace: Trace
    outcomes: int = DEFAULT_OUTCOMES
    contention: Contention = APART
    """Of async mode on the devices at hand."""
    hit_rate: float | None = None
    """One given rate instead of what the trace tells."""
    fused_rows: int | None = None
    second_device: bool = False
    """Whether the drafter already has a device of its own."""

    def __post_init__(self) -> None:
        """Raises InvalidRequest."""
        if not 1 <= self.outcomes <= MOST_OUTCOMES:
            raise InvalidRequest(f"outcomes: {self.outcomes} is not within 1 and {MOST_OUTCOMES}")
        if self.hit_rate is not None and not 0 <= self.hit_rate <= 1:
            raise InvalidRequest(f"hit rate: {self.hit_rate:g} is not within 0 and 1")
        if self.fused_rows is not None and self.fused_rows < 2:
            raise InvalidRequest(
                f"rows: {self.fused_rows} leaves no room for a slot beside the anchor; give 2 or more"
            )


@dataclass(frozen=True)
class Option:
    """One way of decoding, modelled."""

    label: str
    modelled: Modelled
    note: str = ""


def options(setup: Setup) -> list[Option]:
    """Plain first, then what the costs and the trace allow."""
    rounds, costs = setup.trace.rounds, setup.costs
    found = [Option("plain", plain(rounds, costs))]
    if not costs.has_drafter or setup.trace.draft_length < 1:
        return found
    if setup.trace.mode != "fused":
        found.append(Option(f"serial {setup.trace.draft_length}", serial(rounds, costs)))
        found += _async(setup)
    if costs.has_fused and setup.fused_rows is not None:
        found.append(_fused(setup, setup.fused_rows))
    return found


def _async(setup: Setup) -> Iterator[Option]:
    """With the hit rate that is known; else the two ends between which it lies."""
    told = hit_rates(setup.trace, setup.outcomes)
    rates = (
        [((setup.hit_rate,), "as given")]
        if setup.hit_rate is not None
        else [told]
        if told is not None
        else []
    )
    if not rates:
        rates = [((1.0,), "if every successor were there"), ((0.0,), "if none were")]
    for rate, source in rates:
        # what a trace says of single rounds holds for its own run only
        rounds = (
            setup.trace.rounds
            if source == "recorded"
            else [one._replace(hit=None) for one in setup.trace.rounds]
        )
        modelled = asynchronous(rounds, setup.costs, setup.outcomes, rate, setup.contention)
        label = f"async {setup.trace.draft_length}, {setup.outcomes} outcomes"
        yield Option(label, modelled, f"hits {source}, hit rate {modelled.hit_rate or 0:.2f}")


def _fused(setup: Setup, rows: int) -> Option:
    if setup.trace.mode == "fused":
        return Option(f"fused, {rows} rows", fused(setup.trace.rounds, setup.costs, rows))
    rounds = fused_rounds(setup.trace, rows)
    return Option(
        f"fused, {rows} rows",
        fused(rounds, setup.costs, rows),
        "acceptance estimated from serial rounds",
    )


def fastest_rows(costs: Costs, trace: Trace) -> int | None:
    """Rows of a fused pass that take least time a token, of those that the program tries where no
    preset names any. None where there is no fused mode, and for rounds of fused mode, which had
    their own."""
    if not costs.has_fused or trace.mode == "fused" or trace.draft_length < 1:
        return None
    return min(
        BUDGETS_OF_ROWS, key=lambda rows: fused(fused_rounds(trace, rows), costs, rows).tpot_s
    )


def best(setup: Setup) -> Option:
    return min(options(setup), key=lambda option: option.modelled.tpot_s)


@dataclass(frozen=True)
class Advice:
    """A change and what it would give."""

    change: str
    option: Option
    gain: float
    """Times as fast as the best without it."""
    proviso: str = ""


def advice(setup: Setup, layers: Sequence[tuple[int, float]] = ()) -> list[Advice]:
    """Changes that would save time, the most first. layers: (layers left of the drafter, what is
    then left of its passes)."""
    now = best(setup)
    tried: list[tuple[str, Setup, str]] = [
        *(
            (
                f"draft {length} tokens a round",
                replace(setup, trace=setup.trace.shortened(length)),
                "",
            )
            for length in _lengths(setup)
        ),
        *(
            (f"prepare {budget} outcomes", replace(setup, outcomes=budget), "")
            for budget in BUDGETS
            if budget != setup.outcomes
            and setup.hit_rate is None
            and (setup.trace.recall or setup.trace.hits_by_budget)
        ),
    ]
    if not setup.second_device:
        tried.append(
            (
                "give the drafter a second device like this one",
                replace(setup, contention=APART, second_device=True),
                "",
            )
        )
    tried += [
        (f"keep {kept} of the drafter's layers", _thin(setup, factor), _proviso(setup, factor, now))
        for kept, factor in layers
    ]
    found = []
    for change, changed, proviso in tried:
        option = best(changed)
        gain = now.modelled.tpot_s / option.modelled.tpot_s
        if gain > 1 + WORTH and (not proviso or option.label != "plain"):
            found.append(Advice(change, option, gain, proviso))
    return sorted(_best_of_kind(found), key=lambda one: -one.gain)


def _best_of_kind(found: Sequence[Advice]) -> Iterator[Advice]:
    """Of each kind of change the best; of layers all, for what they cost in acceptance is another
    question each."""
    kinds: dict[str, Advice] = {}
    for one in found:
        kind = one.change if one.proviso else one.change.split()[0]
        if kind not in kinds or one.gain > kinds[kind].gain:
            kinds[kind] = one
    yield from kinds.values()


def _lengths(setup: Setup) -> range:
    return (
        range(1, setup.trace.draft_length)
        if setup.costs.has_drafter and setup.trace.mode != "fused"
        else range(0)
    )


def _thin(setup: Setup, factor: float) -> Setup:
    return replace(setup, costs=ThinnedDraft(setup.costs, factor))


def _proviso(setup: Setup, factor: float, now: Option) -> str:
    """The acceptance length down to which fewer layers would not be slower."""
    option = best(_thin(setup, factor))
    if option.label == "plain":
        return "plain stays faster"
    least = option.modelled.tokens_a_round * option.modelled.tpot_s / now.modelled.tpot_s
    return f"if acceptance length stays above {least:.2f}"
