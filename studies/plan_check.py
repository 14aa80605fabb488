"""Does the model of rounds predict what was measured?

usage: python studies/plan_check.py PROFILE.json RUN [--rows 12] [--hit-rate 0.5] [--outcomes 1]
           [--dtype bfloat16] [--threads 2]

PROFILE.json: from `d3d profile`. RUN: a benchmark's directory, or a file that `d3d plan --trace`
takes. Each run is predicted from the verdicts of its rounds and the profile alone, and its time per
token compared with the measured one. Prints a table."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from d3d.errors import InvalidRequest
from d3d.lab.bench.results import traces_of
from d3d.lab.plan.plan import Scenario
from d3d.lab.plan.simulate import Modelled, asynchronous, fused, plain, serial
from d3d.lab.plan.sources import CostSource
from d3d.lab.plan.trace import MODELLED_MODES, Trace, read_trace
from d3d.lab.report.tables import Table, markdown, milliseconds
from shared import make_parser

TOLERANCE = 0.1
"""Largest relative error of a trustworthy model."""


@dataclass(frozen=True)
class Checked:
    """A predicted run. Seconds per token after the first."""

    trace: Trace
    tokens: int
    predicted_s: float
    measured_s: float

    @property
    def error(self) -> float:
        """Relative; positive if the model is too slow."""
        return self.predicted_s / self.measured_s - 1

    @property
    def within(self) -> bool:
        return abs(self.error) <= TOLERANCE


def check(scenario: Scenario) -> Checked:
    """Raises InvalidRequest for a trace without times, and for one that can't be modelled."""
    measured = scenario.trace.measured
    if measured is None:
        raise InvalidRequest(
            f"{scenario.trace.source}: it holds no times to compare with; give a trace or results "
            "with times"
        )
    predicted = _predict(scenario).tpot_s
    return Checked(scenario.trace, measured.tokens, predicted, measured.tpot_s)


def _predict(scenario: Scenario) -> Modelled:
    trace, costs = scenario.trace, scenario.costs
    if trace.mode == "plain":
        return plain(trace.rounds, costs)
    if trace.mode == "serial":
        return serial(trace.rounds, costs)
    if trace.mode == "fused":
        if scenario.fused_rows is None and any(each.num_slots is None for each in trace.records):
            raise InvalidRequest(
                f"{trace.source}: fused rounds don't say how many rows their passes had; give "
                "--rows"
            )
        return fused(trace.rounds, costs, scenario.fused_rows or 0)
    if trace.mode == "async":
        rates = scenario.hit_rates
        if rates is None:
            raise InvalidRequest(
                f"{trace.source}: async rounds that don't say which were hits; give --hit-rate"
            )
        return asynchronous(trace.rounds, costs, scenario.outcomes, rates[0], scenario.contention)
    raise InvalidRequest(
        f"{trace.source}: mode {trace.mode!r} is not modelled; {', '.join(MODELLED_MODES)} are"
    )


def table(runs: list[Checked]) -> Table:
    rows = tuple(
        (
            run.trace.source,
            run.trace.mode,
            run.trace.draft_length or None,
            run.tokens,
            milliseconds(run.predicted_s, 2),
            milliseconds(run.measured_s, 2),
            f"{100 * run.error:+.1f} %",
            "yes" if run.within else "no",
            run.trace.fallbacks or None,
        )
        for run in runs
    )
    note = (
        "Predicted from the verdicts of the recorded rounds and the costs of passes, not from the "
        f"recorded times. {sum(run.within for run in runs)} of {len(runs)} within {TOLERANCE:.0%}. "
        "Rounds without a draft, in async mode: the worker did not answer in time; the waiting "
        "before them is not modelled."
    )
    headings = (
        "run",
        "mode",
        "draft length",
        "tokens",
        "ms a token, modelled",
        "ms a token, measured",
        "error",
        f"within {TOLERANCE:.0%}",
        "rounds without a draft",
    )
    return Table("The model against what was measured", headings, rows, note)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("profile", type=Path)
    parser.add_argument("run", type=Path)
    parser.add_argument("--rows", type=int, help="of fused passes, if the run does not say")
    parser.add_argument("--hit-rate", type=float, help="of async rounds, if they do not say")
    parser.add_argument("--outcomes", type=int, help="of async rounds")
    parser.add_argument("--dtype", help="part of the profile; default: as the run was computed")
    parser.add_argument("--threads", type=int, help="part of the profile, too")
    options = parser.parse_args()
    source = CostSource(options.profile, dtype=options.dtype, threads=options.threads)
    traces = traces_of(options.run) if options.run.is_dir() else [read_trace(options.run)]
    runs = [
        check(
            source.scenario(
                trace, outcomes=options.outcomes, hit_rate=options.hit_rate, rows=options.rows
            )
        )
        for trace in traces
    ]
    print(markdown(table(runs)))


if __name__ == "__main__":
    main()
