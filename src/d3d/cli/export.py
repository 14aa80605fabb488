"""`d3d export`: a drafter as a plain causal language model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from d3d.cli import options as o


@o.takes(o.TARGET)
def export(
    *,
    drafter: Annotated[str, typer.Argument(help="Drafter: directory, hub id or preset.")],
    output: Annotated[Path, typer.Argument(metavar="OUT", help="New directory for the model.")],
    dtype: Annotated[
        str,
        typer.Option(
            help="auto, float32, bfloat16 or float16; auto is what the base is stored in."
        ),
    ] = "auto",
    mask_token_id: Annotated[
        int | None,
        typer.Option(
            help="Reserved token whose place the learned mask takes; a token is added by default.",
            min=0,
        ),
    ] = None,
    model: str | None,
) -> None:
    """Merge a drafter into a directory that transformers loads as a plain causal language model;
    prints the directory.

    --model: the target, or the model that the deltas belong to; by default the one that the
    checkpoint names."""
    from d3d.cli.console import note
    from d3d.hub.export import export_drafter
    from d3d.hub.names import resolve_drafter

    exported = export_drafter(
        resolve_drafter(drafter), output, target=model, dtype=dtype, mask_token_id=mask_token_id
    )
    for limit in exported.limits:
        note(f"warning: {limit}", "yellow")
    note(
        f"{exported.dtype}, {exported.vocab_size} tokens, masked places are token id "
        f"{exported.mask_token_id}"
    )
    typer.echo(exported.path)
