"""`d3d pull`: fetch models before their first use."""

from __future__ import annotations

from typing import Annotated

import typer


def pull(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="NAME",
            help="Presets, hub ids (org/name or org/name@revision) or .gguf files; none lists the "
            "presets.",
        ),
    ] = None,
) -> None:
    """Fetch models and make them ready, so that later starts need no network."""
    if not names:
        _list_presets()
        return
    from d3d.hub.names import resolve_model

    for name in names:
        typer.echo(f"{name}: {resolve_model(name)}")


def _list_presets() -> None:
    from d3d.hub.download import find_conversion, is_cached
    from d3d.hub.presets import PRESETS, SHIPPED, read_preset

    for preset in PRESETS.values():
        target = preset.target
        ready = find_conversion(target) is not None
        state = "ready" if ready else "fetched" if is_cached(target) else "not fetched"
        typer.echo(f"{preset.name}  {preset.summary}; {preset.target.licence}; {state}")
    for name in SHIPPED:
        preset_file = read_preset(name)
        typer.echo(
            f"{name}  the target of {preset_file.target} with a drafter of its own, in "
            f"{preset_file.mode} mode (d3d show {name})"
        )
