"""`d3d calibrate`: is recent traffic still like what a preset was tuned on?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from d3d.lab.tune.calibrate import Comparison


def calibrate(
    traffic: Annotated[Path, typer.Argument(help="Requests that --record has written.")],
    model: Annotated[str, typer.Option(help="Preset file that d3d tune has written.")],
    last: Annotated[int | None, typer.Option(help="Only the last so many requests.", min=1)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Compare recent traffic with what a preset was tuned on, and say whether to keep it, tune
    again or train again."""
    import json

    from d3d.cli.console import note
    from d3d.errors import InvalidRequest
    from d3d.hub.presets import is_preset_file, read_preset
    from d3d.lab.tune.calibrate import calibrate as compare
    from d3d.lab.tune.traffic import read_traffic

    if not is_preset_file(model):
        raise InvalidRequest(
            f"--model {model} is no preset file; give one that d3d tune has written"
        )
    preset = read_preset(model)
    records, damaged = read_traffic(traffic)
    if damaged:
        note(f"passed over {damaged} damaged lines", "yellow")
    found = compare(preset, records if last is None else records[-last:])
    typer.echo(json.dumps(found.to_dict()) if as_json else "\n".join(lines(found)))


def lines(found: Comparison) -> list[str]:
    """What a person reads."""
    shown = [f"compared           {found.compared} requests"]
    shown += [f"left out           {count}: {why}" for why, count in found.left_out.items()]
    shown.append(f"acceptance length  {found.tuned_length:.2f} when tuned")
    if found.recent_length is not None and found.change is not None:
        shown[-1] += (
            f", {found.recent_length:.2f} now: {found.change.value:.2f} times ({found.change.low:.2f} to {found.change.high:.2f})"
        )
    shown += [
        f"  {kind:<16} {length:.2f}" for kind, length in found.kinds.items() if len(found.kinds) > 1
    ]
    if found.expected_speed_up is not None:
        value, low, high = found.expected_speed_up
        shown.append(
            f"over plain         {value:.2f} times as fast ({low:.2f} to {high:.2f}), if passes take what they took"
        )
    return [*shown, f"advice             {found.advice}: {found.reason}"]
