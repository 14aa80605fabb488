"""The pruning curve: acceptance and cost at each depth, and the choice of a depth."""

from __future__ import annotations

from typing import Literal, NamedTuple

from pydantic import BaseModel, ConfigDict

from d3d.engine.metrics import ratio
from d3d.errors import InvalidRequest

Objective = Literal["share", "serial", "async"]
"""share: the fewest layers that keep a share of the acceptance length; serial, async: the least
modelled time per token in that mode."""


class Depth(BaseModel):
    """One depth of the drafter."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    layers: int
    """Layers that a draft goes through."""
    removed: int | None
    """The layer removed in this step; None at full depth."""
    screened: dict[int, float] = {}
    """Loss of the slots without each remaining layer, nats."""
    shortlisted: dict[int, float] = {}
    """Acceptance length without each layer of the shortlist."""
    healed: int = 0
    """Training steps so far."""
    acceptance_length: float
    """On the answers that chose the removal."""
    judged: float
    """Acceptance length on answers that chose nothing."""
    checkpoint: str
    """Directory, relative to the run's."""


class DepthTiming(BaseModel):
    """Milliseconds on this machine."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    t_draft_ms: float
    t_verify_ms: float
    t_plain_ms: float
    """The target's pass over one token."""
    measured_plain_ms: float | None = None
    """Per token of whole answers, plain and serial taking turns."""
    measured_serial_ms: float | None = None

    def modelled_ms(self, acceptance_length: float, mode: Literal["serial", "async"]) -> float:
        """Per token; async without misses and without the switch."""
        passes = (self.t_draft_ms, self.t_verify_ms)
        return ratio(sum(passes) if mode == "serial" else max(passes), acceptance_length)


class ChosenDepth(NamedTuple):
    """The chosen depth, and why."""

    depth: Depth
    reason: str


def choose(
    curve: list[Depth], timings: dict[int, DepthTiming], objective: Objective, share: float
) -> ChosenDepth:
    """timings: by number of layers. Raises InvalidRequest if the objective needs missing ones."""
    full = curve[0]
    if objective == "share":
        enough = [depth for depth in curve if depth.judged >= share * full.judged]
        depth = min(enough, key=lambda depth: depth.layers)
        kept = 100 * ratio(depth.judged, full.judged)
        return ChosenDepth(
            depth,
            f"fewest layers that keep {100 * share:g} % of the acceptance length, "
            f"{full.judged:.3f}; these keep {kept:.1f} %",
        )
    for depth in curve:
        if depth.layers not in timings:
            raise InvalidRequest(
                f"the depth of {depth.layers} layers has not been timed, so none can be chosen by "
                "the time it takes"
            )

    def cost(depth: Depth) -> float:
        return timings[depth.layers].modelled_ms(depth.judged, objective)

    best = min(curve, key=cost)
    return ChosenDepth(
        best,
        f"least modelled time per token in {objective} mode: {cost(best):.2f} ms, with all "
        f"{full.layers} layers {cost(full):.2f} ms",
    )
