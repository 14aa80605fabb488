"""How far the model explains D3D's published speed-ups, and what they leave open.

The figures are those of the method's announcement (November 2026): single requests, greedy.
Hardware, number of outcomes, hit rates and denoise steps were not told, so they are assumptions
here, and named as such."""

from __future__ import annotations

from dataclasses import dataclass

from d3d.lab.plan.devices import DEVICES, MODELS, Device, Shape
from d3d.lab.plan.roofline import Efficiency, RooflineCosts

DRAFT_LENGTH = 16
OUTCOMES = DRAFT_LENGTH + 1
"""An assumption: one guess for each number of kept tokens."""
CONTEXT = 512
PRUNED_SHARE = 0.99
"""Of acceptance length, that the drafter of 31 of 36 layers keeps at least."""


@dataclass(frozen=True)
class Claim:
    """A published figure. None: not told."""

    name: str
    target: Shape
    drafter: Shape
    acceptance_length: float | None
    speed_up: float | None


CLAIMS = (
    Claim("Qwen3-8B, D3D-8B", MODELS["qwen3-8b"], MODELS["d3d-8b"], 7.88, 5.00),
    Claim(
        "Qwen3-8B, D3D-31D-8B",
        MODELS["qwen3-8b"],
        MODELS["d3d-31d-8b"],
        round(PRUNED_SHARE * 7.88, 2),
        None,
    ),
    Claim("Qwen3-32B, D3D-8B", MODELS["qwen3-32b"], MODELS["d3d-8b"], 7.73, 5.71),
    Claim("Qwen3-8B, D3D-1.7B (SGLang)", MODELS["qwen3-8b"], MODELS["d3d-1.7b"], None, 3.717),
)
"""The drafter of the 32 B figure is not told; the large one is assumed. The SGLang figure is the
published aggregate."""


@dataclass(frozen=True)
class Explained:
    """A claim on two devices of one kind, modelled. Times in seconds."""

    claim: Claim
    device: Device
    plain_s: float
    verify_s: float
    packed_s: float
    fresh_s: float
    switch_s: float

    @property
    def round_s(self) -> float:
        """With all hits."""
        return max(self.verify_s, self.packed_s) + self.switch_s

    @property
    def all_hits(self) -> float | None:
        """Speed-up over plain; None where no acceptance length was told."""
        return self._speed_up(self.round_s)

    @property
    def no_hits(self) -> float | None:
        return self._speed_up(self.round_s + self.fresh_s)

    @property
    def serial(self) -> float | None:
        return self._speed_up(self.verify_s + self.fresh_s)

    @property
    def published_round_s(self) -> float | None:
        """What a round takes, if plain takes what is modelled and acceptance and speed-up are as
        published."""
        if self.claim.acceptance_length is None or self.claim.speed_up is None:
            return None
        return self.claim.acceptance_length * self.plain_s / self.claim.speed_up

    @property
    def open_s(self) -> float | None:
        """Of that, what the round with all hits does not explain; below 0 where the published round
        is the shorter one."""
        return None if self.published_round_s is None else self.published_round_s - self.round_s

    @property
    def hit_rate(self) -> float | None:
        """At which misses alone would explain the published round; outside of 0 and 1 where they
        can't."""
        return None if self.open_s is None else 1 - self.open_s / self.fresh_s

    @property
    def needed_acceptance(self) -> float | None:
        """Acceptance length at which all hits give the published speed-up."""
        return (
            None
            if self.claim.speed_up is None
            else self.claim.speed_up * self.round_s / self.plain_s
        )

    def _speed_up(self, round_s: float) -> float | None:
        return (
            None
            if self.claim.acceptance_length is None
            else self.claim.acceptance_length * self.plain_s / round_s
        )


def explain(
    claim: Claim, device: Device, reached: Efficiency, outcomes: int = OUTCOMES
) -> Explained:
    """Raises InvalidRequest where the weights do not fit."""
    costs = RooflineCosts(claim.target, claim.drafter, device, 2, reached)
    return Explained(
        claim,
        device,
        plain_s=costs.verify(1, CONTEXT),
        verify_s=costs.verify(DRAFT_LENGTH + 1, CONTEXT),
        packed_s=costs.packed(DRAFT_LENGTH, outcomes, CONTEXT),
        fresh_s=costs.draft(DRAFT_LENGTH, CONTEXT),
        switch_s=costs.switch_s,
    )


def explain_all(
    reached: Efficiency, names: tuple[str, ...] = ("h100", "h200", "a100"), outcomes: int = OUTCOMES
) -> list[Explained]:
    return [explain(claim, DEVICES[name], reached, outcomes) for claim in CLAIMS for name in names]
