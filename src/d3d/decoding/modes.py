"""From the name of a mode to what the loop is given: a target, a drafter, and how long a draft
is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Literal, NamedTuple

from d3d.core.protocols import Drafter, SelfDrafter, TargetEngine
from d3d.drafting.block_drafter import BlockDrafter
from d3d.drafting.fused import (
    LONGEST_COPY,
    FusedEngine,
    check_fused,
    longest_fused_draft,
    row_price,
)
from d3d.drafting.lookup_first import LookupFirst
from d3d.drafting.pausing import Pausing
from d3d.errors import InvalidRequest
from d3d.target.native import NativeEngine

Mode = Literal["plain", "serial", "fused", "async", "auto"]
MODES: tuple[Mode, ...] = ("plain", "serial", "fused", "async", "auto")

DEFAULT_DRAFT_LENGTH = 5
DEFAULT_FUSED_DRAFT_LENGTH = 6
DEFAULT_OUTCOMES = 1
"""The budget of least time per token on two CPU cores (docs/async.md); where rows are nearly free,
more pay."""
MOST_OUTCOMES = 256
MOST_LOOKUP = 32
SERIAL_OPTIONS = ("num_denoise_steps", "draft_confidence", "least_kept")
"""Fields of `ModeOptions` that serial mode alone looks at."""
SPARING_OPTIONS = ("draft_confidence", "lookup", "least_kept")
"""Those that say when a draft is spared, or a part of it."""


class ModeOptions(NamedTuple):
    """What a request may say about its mode; None where it says nothing."""

    draft_length: int | None = None
    """Tokens to draft a round, at most the drafter's block_size (in fused mode one fewer, or with
    `lookup` LONGEST_COPY)."""
    num_denoise_steps: int | None = None
    """Drafter passes a block, at most draft_length. Serial mode only."""
    rows: int | None = None
    """Most rows of a pass for each sequence. Fused mode only."""
    outcomes: int | None = None
    """Verdicts to prepare for in a round. Async mode only, as what follows."""
    miss_policy: str | None = None
    """What a round without a successor does: `draft_now` waits for a fresh draft, `bonus_only` goes
    on without one."""
    placement: str | None = None
    """Where the draft worker runs: `thread`, `processes`, or on CUDA `streams` or `devices`."""
    draft_confidence: float | None = None
    """Cut a draft where the drafter's chance that all of it is kept falls below this, within 0 and
    1. Serial mode only."""
    lookup: int | None = None
    """Where the text's last tokens, this many or more, stand earlier in it, draft what followed
    them, without the drafter; 0: never. In serial mode, and in fused mode where it promises more
    than the slots do."""
    least_kept: float | None = None
    """While drafts keep fewer tokens than this in the mean, ask the drafter only in every eighth
    round; 0 always asks. Serial mode only."""


class AsyncOptions(NamedTuple):
    """What async mode is to do; None where its default is wanted."""

    draft_length: int
    outcomes: int
    miss_policy: str | None
    placement: str | None


class Decoding(NamedTuple):
    """Arguments of `d3d.decoding.loop.decode`."""

    target: TargetEngine
    drafter: Drafter | None
    draft_length: int


def decoding(
    mode: str,
    target: TargetEngine,
    drafter: BlockDrafter | None,
    options: ModeOptions,
    default_rows: Callable[[], int],
    open_async: Callable[[AsyncOptions], Drafter],
) -> Decoding:
    """For every mode but auto, which `auto_modes` makes of these. `default_rows`: what fused mode
    gets where the options name no rows; `open_async`: makes async mode's drafter. Raises
    InvalidRequest for a mode that does not exist or that this drafter can't serve, and for options
    that mean nothing in it or are out of range."""
    if mode not in MODES:
        raise InvalidRequest(f"mode: {mode!r} is not one of {', '.join(MODES)}")
    refuse_foreign(mode, options)
    if mode == "plain":
        return Decoding(target, None, 0)
    if drafter is None:
        raise InvalidRequest(
            f"mode: {mode} needs a drafter, and the target was loaded without one; name one, or use plain"
        )
    if mode != "serial" and not isinstance(target, NativeEngine):
        raise InvalidRequest(
            f"mode: {mode} needs d3d's own engine to run the target; leave the other engine out, or use plain or serial"
        )
    if mode == "fused" and isinstance(target, NativeEngine):
        return _fused(target, drafter, options, default_rows)
    width = checked_draft_length(options.draft_length, drafter.block_size, DEFAULT_DRAFT_LENGTH)
    if mode == "async":
        return Decoding(
            target,
            open_async(
                AsyncOptions(
                    width,
                    checked_outcomes(options.outcomes),
                    options.miss_policy,
                    options.placement,
                )
            ),
            width,
        )
    return Decoding(target, _of_serial(drafter, options, width), width)


def _of_serial(drafter: BlockDrafter, options: ModeOptions, width: int) -> Drafter:
    """With everything that serial mode's options put around it."""
    steps, confidence = (
        checked_steps(options.num_denoise_steps, width),
        checked_confidence(options.draft_confidence),
    )
    asked: SelfDrafter = replace(drafter, num_denoise_steps=steps, draft_confidence=confidence)
    if least_kept := checked_least_kept(options.least_kept):
        asked = Pausing(asked, least_kept)
    if shortest := checked_lookup(options.lookup):
        asked = LookupFirst(asked, shortest)
    return asked


def _fused(
    target: NativeEngine,
    drafter: BlockDrafter,
    options: ModeOptions,
    default_rows: Callable[[], int],
) -> Decoding:
    check_fused(drafter.model, target.model)  # before rows are measured
    wanted, lookup = checked_rows(options.rows), checked_lookup(options.lookup)
    width = checked_fused_length(
        options.draft_length, drafter.model.config.longest_slot_draft, lookup
    )
    engine = FusedEngine(
        target,
        drafter.model,
        width,
        wanted or default_rows(),
        lookup=lookup,
        row_price=row_price(target.model.device),
    )
    return Decoding(engine, engine.drafter, width)


def checked_fused_length(wanted: int | None, longest_group: int, lookup: int) -> int:
    """Most tokens of fused mode's drafts, where slots draft at most `longest_group`; copies may be
    longer. Raises InvalidRequest as `checked_draft_length`."""
    if not lookup:
        return checked_draft_length(wanted, longest_group, DEFAULT_FUSED_DRAFT_LENGTH)
    longest = longest_fused_draft(longest_group, lookup)
    if wanted is not None and not 1 <= wanted <= longest:
        raise InvalidRequest(
            f"draft length: {wanted} is not within 1 and {longest}: slots draft {longest_group} tokens at most, and copies from the text "
            f"have {LONGEST_COPY}"
        )
    return wanted or LONGEST_COPY


def option_name(field: str) -> str:
    """How a field of `ModeOptions` is called in messages."""
    return field.removeprefix("num_").replace("_", " ")


def refuse_foreign(mode: str, options: ModeOptions) -> None:
    """Raises InvalidRequest for options that this mode does not look at, unless they ask for
    nothing, and for those of a wrong type."""
    _check_types(options)
    options = options._replace(lookup=options.lookup or None, least_kept=options.least_kept or None)
    if mode == "plain" and options.draft_length is not None:
        raise InvalidRequest(
            "draft length: plain mode drafts nothing; leave it out, or use another mode with a drafter"
        )
    if mode != "serial":
        for field in SERIAL_OPTIONS:
            if getattr(options, field) is not None:
                raise InvalidRequest(
                    f"{option_name(field)}: {mode} mode has none; leave it out, or use mode serial with a drafter"
                )
    if mode not in ("serial", "fused") and options.lookup is not None:
        raise InvalidRequest(
            f"lookup: {mode} mode looks nothing up; leave it out, or use mode serial or fused with a drafter"
        )
    if mode != "fused" and options.rows is not None:
        raise InvalidRequest(
            f"rows: {mode} mode has no budget of rows; leave it out, or use mode fused"
        )
    if mode != "async":
        for name, value in (
            ("outcomes", options.outcomes),
            ("miss policy", options.miss_policy),
            ("placement", options.placement),
        ):
            if value is not None:
                raise InvalidRequest(
                    f"{name}: {mode} mode has none; leave it out, or use mode async with a drafter"
                )


def _check_types(options: ModeOptions) -> None:
    for field, value in options._asdict().items():
        if field in ("miss_policy", "placement"):
            fits, kind = isinstance(value, str), "a name"
        elif field in ("draft_confidence", "least_kept"):
            fits, kind = isinstance(value, int | float) and not isinstance(value, bool), "a number"
        else:
            fits, kind = isinstance(value, int) and not isinstance(value, bool), "a whole number"
        if value is not None and not fits:
            raise InvalidRequest(f"{option_name(field)}: {value!r} is not {kind}")


def checked_outcomes(wanted: int | None) -> int:
    """Raises InvalidRequest for an impossible number."""
    outcomes = DEFAULT_OUTCOMES if wanted is None else wanted
    if not 1 <= outcomes <= MOST_OUTCOMES:
        raise InvalidRequest(f"outcomes: {outcomes} is not within 1 and {MOST_OUTCOMES}")
    return outcomes


def checked_steps(wanted: int | None, draft_length: int) -> int:
    """Denoise steps. Raises InvalidRequest for more than there are tokens to denoise."""
    if wanted is not None and not 1 <= wanted <= draft_length:
        raise InvalidRequest(
            f"denoise steps: {wanted} is not within 1 and the draft length, {draft_length}"
        )
    return wanted or 1


def checked_confidence(wanted: float | None) -> float | None:
    """Raises InvalidRequest for what is no probability."""
    if wanted is not None and not 0 <= wanted <= 1:
        raise InvalidRequest(
            f"draft confidence: {wanted:g} is no probability; give one within 0, which cuts nothing, and 1"
        )
    return wanted


def checked_lookup(wanted: int | None) -> int:
    """Tokens of the shortest run; 0 where nothing is looked up. Raises InvalidRequest for an
    impossible one."""
    if wanted is not None and not 0 <= wanted <= MOST_LOOKUP:
        raise InvalidRequest(
            f"lookup: {wanted} is not within 0, which looks nothing up, and {MOST_LOOKUP}"
        )
    return wanted or 0


def checked_least_kept(wanted: float | None) -> float:
    """Raises InvalidRequest for what can't be a mean number of tokens."""
    if wanted is not None and not 0 <= wanted < float("inf"):
        raise InvalidRequest(
            f"least kept: {wanted:g} is no number of tokens; give 0, which always drafts, or more"
        )
    return wanted or 0.0


def checked_rows(wanted: int | None) -> int | None:
    """Raises InvalidRequest for too few."""
    if wanted is not None and wanted < 2:
        raise InvalidRequest(
            f"rows: {wanted} leaves no room for a slot beside the anchor; give 2 or more"
        )
    return wanted


def checked_draft_length(wanted: int | None, longest: int, default: int) -> int:
    """Raises InvalidRequest for more than the drafter can draft."""
    if wanted is not None and not 1 <= wanted <= longest:
        raise InvalidRequest(
            f"draft length: {wanted} is not within 1 and the most that the drafter can draft, {longest}"
        )
    return wanted or min(default, longest)
