"""What a preset file says about decoding."""

from __future__ import annotations

from pathlib import Path

from d3d.decoding.modes import MODES, SPARING_OPTIONS, ModeOptions, refuse_foreign
from d3d.errors import InvalidCheckpoint, InvalidRequest
from d3d.hub.presets import PRESETS, PresetFile, is_preset_file, read_preset


def choices_of(target: str) -> PresetFile | None:
    """None for a target that is no preset file. Raises InvalidCheckpoint for one whose options
    don't fit each other."""
    if target in PRESETS or not is_preset_file(target) or Path(target).expanduser().is_dir():
        return None
    choices = read_preset(target)
    try:
        if choices.mode not in MODES:
            raise InvalidRequest(f"mode: {choices.mode!r} is not one of {', '.join(MODES)}")
        if choices.mode != "auto":  # which looks at the options of every mode
            refuse_foreign(
                choices.mode, ModeOptions(*(getattr(choices, name) for name in ModeOptions._fields))
            )
    except InvalidRequest as error:
        raise InvalidCheckpoint(f"preset {target}: {error}") from error
    return choices


def usual_mode(choices: PresetFile | None, *, has_drafter: bool) -> str:
    """The mode of a request that names none: the preset's, else serial where there is a drafter."""
    if choices is not None and (has_drafter or choices.mode == "plain"):
        return choices.mode
    return "serial" if has_drafter else "plain"


def filled_in(
    choices: PresetFile | None, mode: str, options: ModeOptions, *, has_drafter: bool
) -> ModeOptions:
    """Options of a request in this mode: its own, and what it leaves open as the preset has it,
    where that is of the same mode. In auto mode also when drafts are spared, as a preset of serial
    mode has it, where there is a drafter."""
    if choices is None:
        return options
    names: tuple[str, ...] = ModeOptions._fields if mode == choices.mode else ()
    if mode == "auto" and choices.mode == "serial" and has_drafter:
        names = SPARING_OPTIONS
    of_preset = {name: getattr(choices, name) for name in names if getattr(options, name) is None}
    return options._replace(**of_preset)
