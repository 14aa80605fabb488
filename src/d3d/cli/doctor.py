"""`d3d doctor`: versions, devices, cached models, and whether a target fits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from d3d.cli import options as o
from d3d.json_text import to_json

if TYPE_CHECKING:
    from d3d.cli.system_report import TargetReport


@o.takes(o.TARGET)
def doctor(
    *,
    context: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens of context to size for; the target's longest by default."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    model: str | None,
) -> None:
    """Show versions, devices, memory, cached models and measured costs of passes; with --model,
    whether a target fits."""
    import torch

    from d3d.cli import system_report
    from d3d.hub.cache import cache_root
    from d3d.methods.costs import costs_journal, read_costs

    devices = system_report.devices()
    report = system_report.target_report(model, context, devices) if model else None
    facts: dict[str, Any] = {
        "versions": system_report.versions(),
        "devices": [device._asdict() for device in devices],
        "threads": torch.get_num_threads(),
        "c_library": system_report.c_library(),
        "cache": {
            "path": str(cache_root()),
            "items": [item._asdict() for item in system_report.cached_items()],
        },
        "costs": read_costs(costs_journal()),
        "target": {**report._asdict(), "fits": [fit._asdict() for fit in report.fits]}
        if report
        else None,
    }
    if as_json:
        typer.echo(to_json(facts))
        return
    typer.echo("\n".join(_lines(facts)))
    if report:
        typer.echo("\n".join(_target_lines(report)))


def _lines(facts: dict[str, Any]) -> list[str]:
    lines = [
        "versions   " + ", ".join(f"{name} {number}" for name, number in facts["versions"].items())
    ]
    for device in facts["devices"]:
        rounded = "".join(f"; --quantize {name}" for name in device["quantize"])
        memory = f"{_gb(device['available_bytes'])} of {_gb(device['total_bytes'])} available"
        lines.append(
            f"device     {device['name']}: {device['description']}; {memory}; "
            f"{', '.join(device['dtypes'])}" + rounded
        )
    lines.append(f"threads    {facts['threads']}")
    lines.append(f"backend c  {facts['c_library']}")
    items = facts["cache"]["items"]
    lines.append(
        f"cache      {facts['cache']['path']}: "
        + (_gb(sum(item["num_bytes"] for item in items)) if items else "empty")
    )
    lines += [f"           {item['name']}: {_gb(item['num_bytes'])}" for item in items]
    lines += [f"measured   {_cost(entry)}" for entry in facts["costs"]]
    return lines


def _cost(entry: dict[str, Any]) -> str:
    """One measured cost, in one line."""
    on = entry.get("measured_on", {})
    values = ", ".join(
        f"{name} {value:.3g}" for name, value in entry.items() if isinstance(value, int | float)
    )
    where = f"{on.get('dtype')}, {on.get('threads')} threads, {on.get('processor')}"
    return f"{values} ({where}, {entry.get('date')})"


def _target_lines(report: TargetReport) -> list[str]:
    lines = [
        f"target     {report.source}: {report.num_parameters / 1e6:.0f} million parameters, "
        f"{report.context} tokens of context"
    ]
    lines += [
        f"           {fit.device} {fit.precision}: {_gb(fit.needed_bytes)}, "
        f"{'fits' if fit.fits else 'does not fit'}"
        for fit in report.fits
    ]
    return [*lines, f"advice     {report.advice}"]


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f} GB"
