"""`d3d profile`: costs of target and drafter passes on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from d3d.cli.options import DEFAULT_MODEL, DeviceOption

if TYPE_CHECKING:
    from d3d.api import Model

BUSY_LOAD = 0.5
"""Load by other work, in busy cores, above which times are unreliable."""


def profile(
    output: Annotated[
        Path,
        typer.Argument(
            help="The profile to write, such as profile.json. An interrupted one is continued."
        ),
    ],
    target: Annotated[
        str,
        typer.Option(
            "--model",
            "-m",
            "--target",
            help="Preset, directory, GGUF file or hub id of the target.",
        ),
    ] = DEFAULT_MODEL,
    drafter: Annotated[
        str | None, typer.Option(help="Drafter: directory or hub id. Default: the preset's own.")
    ] = None,
    context: Annotated[
        list[int] | None,
        typer.Option(help="Tokens before a pass; may be repeated. Default: 64, 512."),
    ] = None,
    draft_length: Annotated[
        list[int] | None,
        typer.Option(
            help="Tokens to draft; may be repeated. Default: some, up to the drafter's block size."
        ),
    ] = None,
    outcomes: Annotated[
        list[int] | None,
        typer.Option(help="Outcomes of a packed pass; may be repeated. Default: 1, 2, 4, 8, 16."),
    ] = None,
    dtype: Annotated[
        list[str] | None,
        typer.Option(help="float32 or bfloat16; may be repeated. Default: the device's best."),
    ] = None,
    threads: Annotated[
        list[int] | None,
        typer.Option(help="Threads of torch; may be repeated. Default: torch's own number."),
    ] = None,
    placement: Annotated[
        str | None,
        typer.Option(
            help="The draft worker of async: thread, processes, streams or devices. Default: as "
            "for generate."
        ),
    ] = None,
    repeats: Annotated[int, typer.Option(help="Samples of each pass.")] = 7,
    device: DeviceOption = "auto",
) -> None:
    """Measure the passes of plain, serial, fused and async, the switch, and memory, for
    `d3d plan`. Run it on an idle machine."""
    import d3d
    from d3d.cli.console import meter, note
    from d3d.cli.interrupt import telling_what_is_kept
    from d3d.errors import InvalidRequest
    from d3d.lab.plan.measure import Grid, Measurement

    if output.is_dir() or not output.absolute().parent.is_dir():
        raise InvalidRequest(
            f"{output}: it is a directory, or in none that exists; name a file, such as "
            "profile.json"
        )
    grid = Grid(
        tuple(context or Grid.contexts),
        tuple(draft_length or ()),
        tuple(outcomes or Grid.outcomes),
        tuple(threads or ()),
        placement,
        repeats,
    )

    def load(kind: str) -> Model:
        model = d3d.load(target, drafter, device=device, dtype=kind)
        if model.quantize is not None:
            raise InvalidRequest(
                f"profile: {target} asks for {model.quantize} weights, whose passes are not "
                "profiled; name its target"
            )
        return model

    with (
        telling_what_is_kept(lambda: f"samples so far are beside {output}"),
        meter(100) as progress,
    ):
        measured = Measurement(output, grid, tuple(dtype or ("auto",)), load).run(
            lambda done, total, what: progress.show(100 * done // total, what)
        )
    if (measured.machine["load_at_start"] or 0.0) > BUSY_LOAD:
        note("warning: the machine was busy at the start; times are not to be trusted", "yellow")
    points = sum(len(run.points) for run in measured.runs)
    typer.echo(
        f"{output}: {points} medians of up to {repeats} samples; "
        f"d3d plan --profile {output} --trace ..."
    )
