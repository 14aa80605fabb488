"""`d3d plan`: what the modes would give on a machine, from what its passes cost and from recorded
rounds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from d3d.lab.plan.roofline import Efficiency
    from d3d.lab.plan.sources import CostSource
    from d3d.lab.plan.trace import Trace
    from d3d.lab.report.tables import Table


def plan(
    profile: Annotated[
        Path | None, typer.Option(help="What `d3d profile` has measured; or name a --device.")
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(help="Compute costs for h100, h200, a100, l40s or rtx4090 instead."),
    ] = None,
    devices: Annotated[
        int, typer.Option(help="With --device: 1, or 2, of which the second drafts.")
    ] = 2,
    target: Annotated[
        str, typer.Option(help="With --device: qwen3-1.7b, qwen3-8b or qwen3-32b.")
    ] = "qwen3-8b",
    drafter: Annotated[
        str,
        typer.Option(
            help="With --device: d3d-1.7b, d3d-8b, d3d-31d-8b, or another model as a drafter."
        ),
    ] = "d3d-8b",
    trace: Annotated[
        Path | None,
        typer.Option(
            help="Rounds: what generate --json, generate --trace or evaluate wrote, or the directory of a benchmark run."
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
        int | None,
        typer.Option(help="Tokens to draft a round; at most the trace's, which it is by default."),
    ] = None,
    outcomes: Annotated[int, typer.Option(help="Async mode: outcomes prepared in a round.")] = 8,
    hit_rate: Annotated[
        float | None, typer.Option(help="Async mode: 0 to 1, instead of what the trace tells.")
    ] = None,
    rows: Annotated[
        int | None,
        typer.Option(help="Fused mode: rows of a pass. Default: the preset's, else the fastest."),
    ] = None,
    kept_layers: Annotated[
        int | None, typer.Option(help="As if the drafter had only so many layers.")
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            help="Which part of the profile. Default: as the trace was recorded, else the first."
        ),
    ] = None,
    threads: Annotated[int | None, typer.Option(help="Likewise.")] = None,
    bandwidth_share: Annotated[
        float, typer.Option(help="With --device: what is reached of its memory bandwidth.")
    ] = 0.65,
    arithmetic_share: Annotated[
        float, typer.Option(help="With --device: what is reached of its peak arithmetic.")
    ] = 0.5,
    overhead_ms: Annotated[float, typer.Option(help="With --device: added to each pass.")] = 0.0,
    switch_ms: Annotated[
        float,
        typer.Option(help="With --device: from a verdict to the next verification, on a hit."),
    ] = 0.05,
    against: Annotated[
        Path | None,
        typer.Option(
            help="Predict these recorded runs, and say whether the prediction is within 10 % of what was measured."
        ),
    ] = None,
    published: Annotated[
        bool, typer.Option("--published", help="Compare the model with D3D's published speed-ups.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object instead of tables.")
    ] = False,
) -> None:
    """Model rounds: what plain, serial, fused and async mode would take, where the time goes, and
    what to change. Measures nothing."""
    from d3d.errors import InvalidRequest
    from d3d.lab.plan.roofline import Efficiency
    from d3d.lab.plan.sources import CostSource

    reached = Efficiency(bandwidth_share, arithmetic_share, overhead_ms / 1000, switch_ms / 1000)
    if published:
        _show([_published(reached, outcomes)], as_json)
        return
    source = CostSource(
        profile, device, devices, target, drafter, reached, kept_layers, dtype, threads
    )
    source.check()
    if against is not None:
        _show([_against(source, against, rows, outcomes, hit_rate)], as_json)
        return
    given = [
        name
        for name, value in (
            ("trace", trace),
            ("histogram", histogram),
            ("acceptance-length", acceptance_length),
        )
        if value
    ]
    if len(given) != 1:
        raise InvalidRequest(
            f"give one of --trace, --histogram and --acceptance-length, not {' and '.join(given) or 'none'}"
        )
    rounds = _rounds(trace, histogram, acceptance_length, draft_length)
    _show(_plan(source, rounds, outcomes, hit_rate, rows), as_json)


def _rounds(
    path: Path | None,
    histogram: str | None,
    acceptance_length: float | None,
    draft_length: int | None,
) -> Trace:
    from d3d.errors import InvalidRequest
    from d3d.lab.plan.trace import of_histogram, of_mean

    if acceptance_length is not None:
        if draft_length is None:
            raise InvalidRequest(
                "--acceptance-length needs --draft-length: how many tokens were drafted a round"
            )
        return of_mean(acceptance_length, draft_length)
    if histogram is not None:
        try:
            found = of_histogram(
                [int(count) for count in histogram.split(",")], source="--histogram"
            )
        except ValueError as error:
            raise InvalidRequest(
                f"--histogram {histogram!r} is not a list of counts, such as 40,30,20,10"
            ) from error
    else:
        assert path is not None
        traces = [one for one in _traces(path) if one.draft_length]
        if not traces:
            raise InvalidRequest(f"{path}: nothing was drafted in it; record a run with a drafter")
        found = traces[0]
    return found if draft_length is None else found.shortened(draft_length)


def _traces(path: Path) -> list[Trace]:
    from d3d.lab.bench.results import traces_of
    from d3d.lab.plan.trace import read_trace

    return traces_of(path) if path.is_dir() else [read_trace(path)]


def _plan(
    source: CostSource, trace: Trace, outcomes: int, hit_rate: float | None, rows: int | None
) -> list[Table]:
    from d3d.lab.plan.plan import advice, options
    from d3d.lab.report.plan import advice_table, options_table

    setup = source.setup(trace, outcomes=outcomes, hit_rate=hit_rate, rows=rows)
    title = f"{source.title}; {trace.source}, acceptance length {trace.acceptance_length:.2f}"
    return [options_table(options(setup), title), advice_table(advice(setup, source.thinner()))]


def _against(
    source: CostSource, path: Path, rows: int | None, outcomes: int, hit_rate: float | None
) -> Table:
    from d3d.lab.plan.check import check
    from d3d.lab.report.plan import check_table

    return check_table(
        [
            check(trace, *source.assumed(trace, rows=rows, outcomes=outcomes, hit_rate=hit_rate))
            for trace in _traces(path)
        ]
    )


def _published(reached: Efficiency, outcomes: int) -> Table:
    from d3d.lab.plan.published import explain_all
    from d3d.lab.report.plan import published_table

    return published_table(explain_all(reached, outcomes=outcomes), outcomes)


def _show(tables: list[Table], as_json: bool) -> None:
    from d3d.cli.tables import print_table

    if as_json:
        typer.echo(json.dumps({"modelled": True, "tables": [_record(table) for table in tables]}))
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
