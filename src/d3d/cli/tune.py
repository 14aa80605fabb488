"""`d3d tune`: the fastest way to decode your own prompts on this machine, as a preset file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from d3d.cli import options as o
from d3d.inputs import MOST_THREADS

if TYPE_CHECKING:
    from d3d.lab.report.tables import Table
    from d3d.lab.tune.tune import TuneResult


@o.takes(o.TARGET, o.sampling("max_tokens", "temperature", max_tokens=96))
def tune(
    *,
    prompts: Annotated[
        Path,
        typer.Argument(
            help="JSON lines with prompt, turns or messages, or traffic recorded with "
            "--record-text."
        ),
    ],
    output: Annotated[
        Path,
        typer.Argument(
            metavar="OUT",
            help="Directory for the search and its preset.yaml; an existing one is continued.",
        ),
    ],
    drafter: Annotated[
        list[str] | None,
        typer.Option(
            help="Drafter to try: directory or hub id; may be repeated. Default: the preset's own."
        ),
    ] = None,
    mode: Annotated[
        list[str] | None,
        typer.Option(
            help="Mode to try beside plain; may be repeated. Default: serial, fused, and async "
            "with two cores or more."
        ),
    ] = None,
    trials: Annotated[int, typer.Option(help="Setups to try.", min=1)] = 40,
    finalists: Annotated[
        int, typer.Option(help="The best setups, measured again on other prompts.", min=1)
    ] = 3,
    num_prompts: Annotated[
        int, typer.Option("--prompts", help="Most prompts to use, drawn by --seed.", min=1)
    ] = 24,
    concurrency: Annotated[
        int,
        typer.Option(
            help="Prompts answered together: tune for most tokens a second at this number.",
            min=1,
        ),
    ] = 1,
    threads: Annotated[
        list[int] | None,
        typer.Option(
            help="Number of threads to try; may be repeated. Default: powers of two up to the "
            "cores.",
            min=1,
            max=MOST_THREADS,
        ),
    ] = None,
    seed: Annotated[
        int,
        typer.Option(help="Draws the prompts, the setups to try and the noise of sampling.", min=0),
    ] = 0,
    device: o.DeviceOption = "auto",
    dtype: o.DTypeOption = "auto",
    quantize: o.QuantizeOption = None,
    model: str | None,
    sampling: dict[str, Any],
) -> None:
    """Search draft length (fixed or by confidence), method, denoise steps, rows, outcomes, threads
    and drafters for the least time per token.

    The best few answer prompts that the search has not seen, taking turns with plain decoding; the
    fastest becomes OUT/preset.yaml, which every command takes as --model. Ctrl-C keeps what is
    done."""
    from d3d.cli.console import meter, note
    from d3d.cli.interrupt import deferred_interrupt
    from d3d.cli.tables import print_table
    from d3d.engine.params import SamplingParams
    from d3d.lab.tune.prompts import tuning_prompts
    from d3d.lab.tune.search import require_optuna
    from d3d.lab.tune.tune import TunePlan, open_models, space_of
    from d3d.lab.tune.tune import tune as run

    require_optuna()
    _check_modes(mode or [])
    source = model or o.DEFAULT_MODEL
    models = open_models(source, drafter or [], device=device, dtype=dtype, quantize=quantize)
    space = space_of(models, mode or [], threads or [])
    chosen = tuning_prompts(prompts, next(iter(models.values())), limit=num_prompts, seed=seed)
    for line in chosen.notes:
        note(line)
    params = SamplingParams(**sampling, seed=seed)
    plan = TunePlan(output, chosen, params, concurrency, trials, finalists, seed)
    with deferred_interrupt() as stopped:
        result = run(plan, models, space, meter, stopped)
    if result is None:
        note(f"interrupted; the same command goes on from what is in {output}")
        raise typer.Exit(130)
    if not result.split.is_clean:
        note("warning: too few prompts to confirm on others; give at least four", "yellow")
    print_table(_table(result, concurrency), names=1)
    typer.echo(result.preset)
    if result.judged[0].setup.mode == "plain":
        note(
            "plain decoding is the fastest here: a drafter with fewer layers, or one that knows "
            "these prompts, may change that",
            "yellow",
        )


def _check_modes(names: list[str]) -> None:
    from d3d.errors import InvalidRequest
    from d3d.lab.tune.setups import MODES

    for name in names:
        if name not in MODES:
            raise InvalidRequest(
                f"mode: {name!r} is not one of {', '.join(MODES)}; plain is measured anyway"
            )


def _table(result: TuneResult, concurrency: int) -> Table:
    """Table of all setups of the second stage, the fastest first."""
    from d3d.lab.report.tables import Table, number

    cases = len(result.split.confirm)
    rows = tuple(
        (
            f"{each.setup}{' (default)' if each.setup.key == result.default.key else ''}",
            number(each.ms_per_token),
            number(each.speed_up.value),
            f"{each.speed_up.low:.2f} to {each.speed_up.high:.2f}",
            number(each.acceptance_length),
            f"{each.equal} of {len(each.cases)}",
        )
        for each in result.judged
    )
    headings = ("setup", "ms/token", "over plain", "95 %", "acceptance length", "same ids as plain")
    title = f"{cases} prompts" if concurrency == 1 else f"{cases} times {concurrency} prompts"
    return Table(title, headings, rows)
