"""`d3d doctor`: what is installed, what this machine offers, what is cached, and whether a target
fits."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from d3d.cli.system_report import TargetReport


def doctor(
    target: Annotated[
        str | None,
        typer.Option(
            help="Also tell whether this target fits: a preset, directory, .gguf file or hub id."
        ),
    ] = None,
    context: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens of context to size for; the target's longest by default."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show versions, devices, memory and cached models, and whether a target fits."""
    import torch

    from d3d.cli import system_report
    from d3d.hub.cache import cache_root

    found = system_report.devices()
    report = target and system_report.target_report(target, context, found)
    facts: dict[str, Any] = {
        "versions": system_report.versions(),
        "devices": [device._asdict() for device in found],
        "threads": torch.get_num_threads(),
        "cache": {
            "path": str(cache_root()),
            "items": [item._asdict() for item in system_report.cached_items()],
        },
        "target": {**report._asdict(), "fits": [fit._asdict() for fit in report.fits]}
        if report
        else None,
    }
    if as_json:
        typer.echo(json.dumps(facts))
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
            f"device     {device['name']}: {device['description']}; {memory}; {', '.join(device['dtypes'])}"
            + rounded
        )
    lines.append(f"threads    {facts['threads']}")
    items = facts["cache"]["items"]
    lines.append(
        f"cache      {facts['cache']['path']}: "
        + (_gb(sum(item["num_bytes"] for item in items)) if items else "empty")
    )
    lines += [f"           {item['name']}: {_gb(item['num_bytes'])}" for item in items]
    return lines


def _target_lines(report: TargetReport) -> list[str]:
    lines = [
        f"target     {report.source}: {report.num_parameters / 1e6:.0f} million parameters, {report.context} tokens of context"
    ]
    lines += [
        f"           {fit.device} {fit.precision}: {_gb(fit.needed_bytes)}, {'fits' if fit.fits else 'does not fit'}"
        for fit in report.fits
    ]
    return [*lines, f"advice     {report.advice}"]


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f} GB"
