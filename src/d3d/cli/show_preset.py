"""`d3d show`: what a preset holds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from d3d.hub.presets import Preset, PresetFile, Tuned


def show(
    preset: Annotated[str, typer.Argument(help="Preset, or preset file.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show what a preset brings, how it decodes, and how that was found out."""
    import json

    from d3d.hub.presets import find_preset, is_preset_file, read_preset

    if not is_preset_file(preset):
        known = find_preset(preset)
        typer.echo(
            json.dumps(_facts(known))
            if as_json
            else "\n".join(f"{name:<18} {value}" for name, value in _facts(known).items())
        )
        return
    found = read_preset(preset)
    if as_json:
        typer.echo(json.dumps(found.model_dump(mode="json", exclude_none=True)))
        return
    typer.echo("\n".join(_lines(found)))


def _facts(preset: Preset) -> dict[str, object]:
    facts = {
        "name": preset.name,
        "summary": preset.summary,
        "target": preset.hub_id or preset.target.filename,
        "drafter": preset.drafter,
        "licence": preset.target.licence,
        "rows": preset.fused_rows,
    }
    return {name: value for name, value in facts.items() if value is not None}


def _lines(found: PresetFile) -> list[str]:
    fields = found.model_dump(exclude={"format", "tuned"}, exclude_none=True)
    lines = [f"{name:<18} {value}" for name, value in fields.items()]
    return lines + (
        _origin(found.tuned)
        if found.tuned
        else [f"{'tuned':<18} no; d3d tune finds such choices by measurement"]
    )


def _origin(tuned: Tuned) -> list[str]:
    low, high = tuned.speed_up_interval
    prompts = (
        "prompts that had no part in the search"
        if tuned.judged_on_other_prompts
        else "the prompts of the search"
    )
    facts = {
        "tuned": f"{tuned.date}, {tuned.trials} settings tried, seed {tuned.seed}",
        "measured": f"{tuned.ms_per_token:.2f} ms a token, plain {tuned.plain_ms_per_token:.2f}: {tuned.speed_up:.2f} times as fast "
        f"({low:.2f} to {high:.2f}), on {prompts}",
        "prompts": f"{tuned.num_prompts} of {tuned.prompts} (sha256 {tuned.prompts_sha256[:12]}), at most {tuned.max_tokens} tokens, "
        f"temperature {tuned.temperature:g}, {tuned.concurrency} at a time",
        "machine": ", ".join(f"{name} {value}" for name, value in tuned.machine.items()),
        "versions": ", ".join(f"{name} {value}" for name, value in tuned.versions.items()),
    }
    if rounds := sum(answer.rounds for answer in tuned.answers):
        facts["acceptance length"] = (
            f"{sum(answer.committed for answer in tuned.answers) / rounds:.2f} over {rounds} rounds"
        )
    return [f"{name:<18} {value}" for name, value in facts.items()]
