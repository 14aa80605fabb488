"""`d3d timeline`: times of target and drafter, from a trace."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from d3d.json_text import to_json

ROUNDS = 16
"""Rounds to draw."""


def timeline(
    trace: Annotated[Path, typer.Argument(help="File written by `d3d generate --trace`.")],
    out: Annotated[Path | None, typer.Option(help="Draw it into this file, .svg or .png.")] = None,
    start: Annotated[int, typer.Option(help="First round to draw.", min=0)] = 0,
    rounds: Annotated[
        int, typer.Option(help="Maximum rounds to draw; the figures cover all.", min=1)
    ] = ROUNDS,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="Print the figures as one JSON object in place of the table."),
    ] = False,
) -> None:
    """Print a trace's times, overlap and hits; draw its rounds with --out."""
    from d3d.cli.tables import print_table
    from d3d.engine.trace import read_trace
    from d3d.errors import InvalidRequest
    from d3d.files import alone_with, write_whole
    from d3d.lab.report.plots import PICTURE
    from d3d.lab.report.timeline import figures, picture, table

    kind = "" if out is None else out.suffix.lower().removeprefix(".")
    if out is not None and kind not in ("svg", "png"):
        raise InvalidRequest(f"--out {out}: name a file that ends in .svg or .png")
    if out is not None and not out.absolute().parent.is_dir():
        raise InvalidRequest(f"--out {out} can't be written: its directory does not exist")
    if out is None and (start, rounds) != (0, ROUNDS):
        raise InvalidRequest("--start and --rounds say what --out draws; name a file with --out")
    known = read_trace(trace)
    if out is not None:
        if start >= len(known):
            raise InvalidRequest(
                f"--start {start} is behind the trace's last round, {len(known) - 1}"
            )
        with alone_with(out, "d3d timeline"):
            write_whole(out, PICTURE, picture(known, kind, start=start, count=rounds))
    if as_json:
        typer.echo(to_json(figures(known)))
    else:
        print_table(table(known, trace.name))
    if out is not None:
        typer.echo(str(out), err=True)
