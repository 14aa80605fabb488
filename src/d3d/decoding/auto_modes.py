"""Which modes auto mode may choose from: those that this drafter and this machine can serve, and
why not the others."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from d3d.core.protocols import Drafter, TargetEngine
from d3d.decoding.auto import AutoDrafter, Candidate
from d3d.decoding.mode_choice import ModeTimes
from d3d.decoding.modes import (
    SERIAL_OPTIONS,
    AsyncOptions,
    Decoding,
    ModeOptions,
    decoding,
    option_name,
)
from d3d.drafting.block_drafter import BlockDrafter
from d3d.errors import D3DError, InvalidRequest

USUAL_ROWS = 12
"""Rows of a fused pass where no preset names them: measuring which are best would cost more than
auto mode may."""

OPTIONS_OF = {
    **dict.fromkeys((*SERIAL_OPTIONS, "lookup"), "serial"),
    "rows": "fused",
    "outcomes": "async",
    "miss_policy": "async",
    "placement": "async",
}
"""Whose options these are; a mode that is left out leaves them without a meaning."""


class Surroundings(NamedTuple):
    """What auto mode is told about where it runs."""

    rows: int
    """Of a fused pass, where the options name none."""
    open_async: Callable[[AsyncOptions], Drafter]
    placement: str | None
    """Async mode's; None where it is not to be tried."""
    no_async: str
    """Why not."""
    times: dict[int, ModeTimes]
    """What is known from earlier generations with these options, by their number of sequences; it
    is added to."""


def auto_decoding(
    target: TargetEngine, drafter: BlockDrafter | None, options: ModeOptions, around: Surroundings
) -> Decoding:
    """What the loop is given for auto mode, for one generation. Raises InvalidRequest for options
    that none of the modes looks at, or that are out of range."""
    modes, left_out = _modes(target, drafter, options, around)
    refuse_options_of(left_out, options)
    candidates = {
        mode: Candidate(one.drafter, one.draft_length)
        for mode, one in modes.items()
        if one.drafter is not None
    }
    auto = AutoDrafter(candidates, left_out, around.times)
    return Decoding(modes["fused"].target if "fused" in modes else target, auto, auto.block_size)


def refuse_options_of(left_out: Mapping[str, str], options: ModeOptions) -> None:
    """Raises InvalidRequest for options that only modes look at which auto mode leaves out;
    `left_out` says why."""
    for name, mode in OPTIONS_OF.items():
        if getattr(options, name) is not None and mode in left_out:
            raise InvalidRequest(
                f"{option_name(name)}: auto leaves {mode} mode out here: {left_out[mode]}"
            )
    if options.draft_length is not None and "serial" in left_out:
        raise InvalidRequest(f"draft length: auto drafts nothing here: {left_out['serial']}")


def _modes(
    target: TargetEngine, drafter: BlockDrafter | None, options: ModeOptions, around: Surroundings
) -> tuple[dict[str, Decoding], dict[str, str]]:
    """What can be tried, in that order, and the reasons why the rest can't."""
    if drafter is None:
        return {}, dict.fromkeys(("serial", "fused", "async"), "there is no drafter")
    length = options.draft_length

    def made(mode: str, given: ModeOptions) -> Decoding:
        return decoding(mode, target, drafter, given, lambda: around.rows, around.open_async)

    of_serial = ModeOptions(length, lookup=options.lookup)._replace(
        **{name: getattr(options, name) for name in SERIAL_OPTIONS}
    )
    modes = {"serial": made("serial", of_serial)}
    left_out = {}
    try:
        modes["fused"] = made(
            "fused", ModeOptions(length, rows=options.rows, lookup=options.lookup)
        )
    except InvalidRequest as error:
        left_out["fused"] = str(error).removeprefix("mode: ")
    placement = options.placement or around.placement
    if placement is None:
        left_out["async"] = around.no_async
        return modes, left_out
    wanted = ModeOptions(
        length, outcomes=options.outcomes, miss_policy=options.miss_policy, placement=placement
    )
    try:
        modes["async"] = made("async", wanted)
    except D3DError as error:
        if options.placement is not None:
            raise
        left_out["async"] = str(error)
    return modes, left_out
