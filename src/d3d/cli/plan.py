"""`d3d plan`: the time per token of every mode, from the costs of passes and recorded rounds."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from d3d.json_text import to_json

if TYPE_CHECKING:
    from d3d.lab.plan.trace import Trace
    from d3d.lab.report.tables import Table


def plan(
    profile: Annotated[
        Path | None, typer.Option(help="Costs: a file of `d3d profile`; or name a --datasheet.")
    ] = None,
    datasheet: Annotated[
        str | None,
        typer.Option(help="Computed costs instead, of an h100, h200, a100, l40s or rtx4090."),
    ] = None,
    devices: Annotated[
        int, typer.Option(help="With --datasheet: 1, or 2, the second for the drafter.")
    ] = 2,
    target: Annotated[
        str, typer.Option(help="With --datasheet: qwen3-1.7b, qwen3-8b or qwen3-32b.")
    ] = "qwen3-8b",
    drafter: Annotated[
        str,
        typer.Option(help="With --datasheet: d3d-1.7b, d3d-8b, d3d-31d-8b, or another model."),
    ] = "d3d-8b",
    trace: Annotated[
        Path | None,
        typer.Option(
            help="Rounds: a file of generate --json, generate --trace or evaluate, or the "
            "directory of a benchmark run."
        ),
    ] = None,
    histogram: Annotated[
        str | None,
        typer.Option(help="Instead of a trace: rounds that kept 0, 1, ... tokens, as 40,30,20,10."),
    ] = None,
    acceptance_length: Annotated[
        float | None, typer.Option(help="Instead of a trace: tokens a round, with --draft-length.")
    ] = None,
    draft_length: Annotated[
        int | None, typer.Option(help="Tokens to draft a round. Default and maximum: the trace's.")
    ] = None,
    outcomes: Annotated[
        int | None,
        typer.Option(help="Async: outcomes prepared in a round. Default: as for generate."),
    ] = None,
    hit_rate: Annotated[
        float | None, typer.Option(help="Async: 0 to 1, instead of the trace's.")
    ] = None,
    rows: Annotated[
        int | None,
        typer.Option(help="Fused: rows of a pass. Default: the preset's, else the fastest."),
    ] = None,
    kept_layers: Annotated[
        int | None, typer.Option(help="Model a drafter with this many layers.")
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(help="Part of the profile. Default: as the trace was recorded, or the first."),
    ] = None,
    threads: Annotated[
        int | None, typer.Option(help="Part of the profile, by default chosen like --dtype.")
    ] = None,
    bandwidth_share: Annotated[
        float, typer.Option(help="With --datasheet: share of the memory bandwidth reached.")
    ] = 0.65,
    arithmetic_share: Annotated[
        float, typer.Option(help="With --datasheet: share of the peak arithmetic reached.")
    ] = 0.5,
    overhead_ms: Annotated[float, typer.Option(help="With --datasheet: added to each pass.")] = 0.0,
    switch_ms: Annotated[
        float,
        typer.Option(help="With --datasheet: from a verdict to the next verification, on a hit."),
    ] = 0.05,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object instead of tables.")
    ] = False,
) -> None:
    """Model the time per token of plain, serial, fused and async, break it down, and show
    possible savings. Measures nothing."""
    from d3d.lab.plan.plan import advice, options
    from d3d.lab.plan.roofline import Efficiency
    from d3d.lab.plan.sources import CostSource
    from d3d.lab.report.plan import advice_table, options_table

    reached = Efficiency(bandwidth_share, arithmetic_share, overhead_ms / 1000, switch_ms / 1000)
    source = CostSource(
        profile, datasheet, devices, target, drafter, reached, kept_layers, dtype, threads
    )
    source.check()
    rounds = _rounds(trace, histogram, acceptance_length, draft_length)
    scenario = source.scenario(rounds, outcomes=outcomes, hit_rate=hit_rate, rows=rows)
    length = f"acceptance length {rounds.acceptance_length:.2f}"
    title = f"{source.title}; {rounds.source}, {length}"
    changes = advice(scenario, source.thinner())
    _show([options_table(options(scenario), title), advice_table(changes)], as_json)


def _rounds(
    path: Path | None,
    histogram: str | None,
    acceptance_length: float | None,
    draft_length: int | None,
) -> Trace:
    """Rounds to model. Raises InvalidRequest unless exactly one of the first three is given."""
    from d3d.errors import InvalidRequest
    from d3d.lab.plan.trace import of_mean

    sources = {"trace": path, "histogram": histogram, "acceptance-length": acceptance_length}
    given = [name for name, value in sources.items() if value is not None]
    if len(given) != 1:
        raise InvalidRequest(
            "give one of --trace, --histogram and --acceptance-length, not "
            f"{' and '.join(given) or 'none'}"
        )
    if acceptance_length is not None:
        if draft_length is None:
            raise InvalidRequest(
                "--acceptance-length needs --draft-length: the tokens drafted in a round"
            )
        return of_mean(acceptance_length, draft_length)
    trace = _of_file(path) if histogram is None else _of_histogram(histogram)
    return trace if draft_length is None else trace.shortened(draft_length)


def _of_histogram(counts: str) -> Trace:
    from d3d.errors import InvalidRequest
    from d3d.lab.plan.trace import of_histogram

    try:
        histogram = [int(count) for count in counts.split(",")]
    except ValueError as error:
        raise InvalidRequest(
            f"--histogram {counts!r} is not a list of counts, such as 40,30,20,10"
        ) from error
    return of_histogram(histogram, source="--histogram")


def _of_file(path: Path | None) -> Trace:
    from d3d.errors import InvalidRequest
    from d3d.lab.bench.results import traces_of
    from d3d.lab.plan.trace import read_trace

    assert path is not None
    traces = traces_of(path) if path.is_dir() else [read_trace(path)]
    for trace in traces:
        if trace.draft_length:
            return trace
    raise InvalidRequest(f"{path}: nothing was drafted in it; record a run with a drafter")


def _show(tables: list[Table], as_json: bool) -> None:
    from d3d.cli.tables import print_table

    if as_json:
        typer.echo(to_json({"modelled": True, "tables": [_record(table) for table in tables]}))
        return
    for table in tables:
        print_table(table, names=1)
        if table.note:
            typer.echo(table.note)


def _record(table: Table) -> dict[str, object]:
    return {
        "title": table.title,
        "note": table.note,
        "rows": [dict(zip(table.headings, row, strict=True)) for row in table.rows],
    }
