"""`d3d serve`: an OpenAI-compatible server."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Annotated

import typer

from d3d.cli import options as o
from d3d.config import SpeculativeChoice

if TYPE_CHECKING:
    from d3d.cli.options import ModelChoice

PANEL = "Server"


@o.takes(o.MODEL, o.SPECULATION)
def serve(
    *,
    host: Annotated[
        str, typer.Option(help="Address to listen on.", rich_help_panel=PANEL)
    ] = "127.0.0.1",
    port: Annotated[
        int,
        typer.Option(
            min=0, max=65535, help="Port; 0 takes one that is free.", rich_help_panel=PANEL
        ),
    ] = 8000,
    max_batch: Annotated[
        int,
        typer.Option(
            min=1, max=1024, help="Most requests decoded together.", rich_help_panel=PANEL
        ),
    ] = 8,
    max_waiting: Annotated[
        int,
        typer.Option(
            min=0,
            max=100_000,
            help="Most requests that wait; further ones get status 429.",
            rich_help_panel=PANEL,
        ),
    ] = 64,
    api_key: Annotated[
        str | None,
        typer.Option(
            help="Key that clients must send.", envvar="D3D_API_KEY", rich_help_panel=PANEL
        ),
    ] = None,
    no_api_key: Annotated[
        bool,
        typer.Option(
            "--no-api-key",
            help="Let anyone who reaches the address use the server.",
            rich_help_panel=PANEL,
        ),
    ] = False,
    served_model_name: Annotated[
        str | None,
        typer.Option(
            help="Name of the model for clients. Default: as in --model.", rich_help_panel=PANEL
        ),
    ] = None,
    drain_s: Annotated[
        float,
        typer.Option(
            "--drain-seconds",
            min=0.0,
            max=3600.0,
            help="Time that answers have to end after SIGTERM.",
            rich_help_panel=PANEL,
        ),
    ] = 10.0,
    choice: ModelChoice,
    speculation: SpeculativeChoice,
) -> None:
    """Serve OpenAI's API on this machine: chat and text completions, models, metrics. SIGTERM and
    Ctrl-C stop it."""
    from d3d.cli.console import note
    from d3d.errors import MissingExtra

    try:
        from d3d.serve.run import bound_socket, check_host
        from d3d.serve.run import serve as run
    except ImportError as error:
        raise MissingExtra(
            "d3d serve needs the extra serve: pip install 'd3d-decoding[serve]'"
        ) from error
    check_host(host, api_key, no_api_key=no_api_key)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    with bound_socket(host, port) as bound:
        name = served_model_name or choice.name
        note(f"loading {choice.name}")
        model = choice.load(speculation)
        address = bound.getsockname()
        shown = f"[{address[0]}]" if ":" in address[0] else address[0]
        run(
            model,
            {"method": speculation.method, **speculation.options},
            bound,
            name=name,
            api_key=api_key,
            max_batch=max_batch,
            max_waiting=max_waiting,
            drain_s=drain_s,
            on_ready=lambda: note(f"serving {name} at http://{shown}:{address[1]}/v1"),
        )
