"""`d3d show`: the contents of a preset."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from d3d.json_text import to_json

if TYPE_CHECKING:
    from d3d.hub.presets import Preset, PresetFile, Tuned


def show(
    preset: Annotated[str, typer.Argument(help="Preset, or preset file.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show a preset's contents, how it decodes, and how that was chosen."""

    from d3d.hub.presets import find_preset, is_preset_file, read_preset

    if is_preset_file(preset):
        file = read_preset(preset)
        record, facts = file.model_dump(mode="json", exclude_none=True), _file_facts(file)
    else:
        record = facts = _facts(find_preset(preset))
    lines = (f"{name:<18} {value}" for name, value in facts.items())
    typer.echo(to_json(record) if as_json else "\n".join(lines))


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


def _file_facts(file: PresetFile) -> dict[str, object]:
    facts = file.model_dump(exclude={"format", "tuned"}, exclude_none=True)
    if file.tuned is None:
        return facts | {"tuned": "no; d3d tune finds such choices by measurement"}
    return facts | _origin(file.tuned)


def _origin(tuned: Tuned) -> dict[str, object]:
    from d3d.engine.metrics import ratio

    low, high = tuned.speed_up_interval
    asked = (
        "prompts that had no part in the search"
        if tuned.judged_on_other_prompts
        else "the prompts of the search"
    )
    facts: dict[str, object] = {
        "tuned": f"{tuned.date}, {tuned.trials} settings tried, seed {tuned.seed}",
        "measured": f"{tuned.ms_per_token:.2f} ms a token, plain {tuned.plain_ms_per_token:.2f}: "
        f"{tuned.speed_up:.2f} times as fast ({low:.2f} to {high:.2f}), on {asked}",
        "prompts": f"{tuned.num_prompts} of {tuned.prompts} "
        f"(sha256 {tuned.prompts_sha256[:12]}), at most {tuned.max_tokens} tokens, "
        f"temperature {tuned.temperature:g}, {tuned.concurrency} at a time",
        "machine": ", ".join(f"{name} {value}" for name, value in tuned.machine.items()),
        "versions": ", ".join(f"{name} {value}" for name, value in tuned.versions.items()),
    }
    if rounds := sum(answer.rounds for answer in tuned.answers):
        length = ratio(sum(answer.committed for answer in tuned.answers), rounds)
        facts["acceptance length"] = f"{length:.2f} over {rounds} rounds"
    return facts
