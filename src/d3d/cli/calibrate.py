"""`d3d calibrate`: does a preset still suit recent traffic?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from d3d.json_text import to_json

if TYPE_CHECKING:
    from d3d.lab.tune.calibrate import Comparison


def calibrate(
    traffic: Annotated[Path, typer.Argument(help="Requests that --record has written.")],
    model: Annotated[str, typer.Option(help="Preset file that d3d tune has written.")],
    last: Annotated[int | None, typer.Option(help="Use only the last N requests.", min=1)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Compare recent traffic with the traffic a preset was tuned on, and say whether to keep it,
    tune again or train again."""

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
    comparison = compare(preset, records if last is None else records[-last:])
    text = to_json(comparison.to_dict()) if as_json else "\n".join(_lines(comparison))
    typer.echo(text)


def _lines(comparison: Comparison) -> list[str]:
    lines = [f"compared           {comparison.compared} requests"]
    lines += [f"left out           {count}: {why}" for why, count in comparison.left_out.items()]
    length = f"acceptance length  {comparison.tuned_length:.2f} when tuned"
    if comparison.recent_length is not None and comparison.change is not None:
        value, low, high = comparison.change
        length += (
            f", {comparison.recent_length:.2f} now: {value:.2f} times ({low:.2f} to {high:.2f})"
        )
    lines.append(length)
    if len(comparison.kinds) > 1:
        lines += [f"  {kind:<16} {length:.2f}" for kind, length in comparison.kinds.items()]
    if comparison.expected_speed_up is not None:
        value, low, high = comparison.expected_speed_up
        lines.append(
            f"over plain         {value:.2f} times as fast ({low:.2f} to {high:.2f}), if passes "
            "take as long as they took"
        )
    return [*lines, f"advice             {comparison.advice}: {comparison.reason}"]
