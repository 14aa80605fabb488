"""The pruning curve: what each depth accepts and costs, and which depth to take."""

from __future__ import annotations

from typing import Literal, NamedTuple

from pydantic import BaseModel, ConfigDict

from d3d.errors import InvalidRequest

Objective = Literal["share", "serial", "async"]
"""What the chosen depth has: the fewest layers that keep a share of the acceptance length, or the
least modelled time per token."""


class Depth(BaseModel):
    """One depth of the drafter."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    layers: int
    """Layers that a draft goes through."""
    removed: int | None
    """The layer that went in this step; None at full depth."""
    screened: dict[int, float] = {}
    """Loss of the slots without each remaining layer, nats."""
    shortlisted: dict[int, float] = {}
    """Acceptance length without each layer of the shortlist."""
    healed: int = 0
    """Training steps so far."""
    acceptance_length: float
    """On the answers that the removal was chosen by."""
    judged: float
    """Acceptance length on answers that chose nothing."""
    checkpoint: str
    """Directory, relative to the run's."""


class Timing(BaseModel):
    """Milliseconds on this machine."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    t_draft_ms: float
    t_verify_ms: float
    t_plain_ms: float
    """A pass of the target over one token."""
    measured_plain_ms: float | None = None
    """Per token of whole answers, plain and serial by turns."""
    measured_serial_ms: float | None = None


class Choice(NamedTuple):
    """The depth that was taken, and why."""

    depth: Depth
    reason: str


def modelled_ms(depth: Depth, timing: Timing, mode: Literal["serial", "async"]) -> float:
    """Milliseconds a token: a round's time over its acceptance length. Async is modelled without
    misses and without the switch."""
    serial = timing.t_draft_ms + timing.t_verify_ms
    return (
        serial if mode == "serial" else max(timing.t_draft_ms, timing.t_verify_ms)
    ) / depth.judged


def choose(
    curve: list[Depth], timings: dict[int, Timing], objective: Objective, share: float
) -> Choice:
    """timings: by number of layers; needed for the objectives `serial` and `async`. Raises
    InvalidRequest where they are missing."""
    full = curve[0]
    if objective == "share":
        enough = [depth for depth in curve if depth.judged >= share * full.judged]
        depth = min(enough, key=lambda depth: depth.layers)
        kept = 100 * depth.judged / full.judged
        return Choice(
            depth,
            f"fewest layers that keep {100 * share:g} % of the acceptance length, {full.judged:.3f}; these keep {kept:.1f} %",
        )
    if missing := [depth.layers for depth in curve if depth.layers not in timings]:
        raise InvalidRequest(
            f"the depth of {missing[0]} layers has not been timed, so none can be chosen by the time it takes"
        )
    depth = min(curve, key=lambda depth: modelled_ms(depth, timings[depth.layers], objective))
    best, before = (modelled_ms(one, timings[one.layers], objective) for one in (depth, full))
    return Choice(
        depth,
        f"least modelled time per token in {objective} mode: {best:.2f} ms, with all {full.layers} layers {before:.2f} ms",
    )
