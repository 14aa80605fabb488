"""How far the model of rounds explains D3D's published speed-ups, and what they leave open.

usage: python studies/published_speedups.py [--outcomes 17] [--bandwidth-share 0.65]
           [--arithmetic-share 0.5] [--overhead-ms 0] [--switch-ms 0.05]

The figures are those of the method's announcement (November 2026): single requests, greedy.
Hardware, outcomes, hit rates and denoise steps were not told, so they are assumed here: one guess
for each number of kept tokens, two devices of a kind. Prints a table whose other columns are
modelled."""

from __future__ import annotations

from dataclasses import dataclass

from d3d.lab.plan.roofline import (
    DATA_SHEETS,
    MODELS,
    DataSheet,
    DecoderShape,
    Efficiency,
    RooflineCosts,
)
from d3d.lab.report.tables import Table, markdown, milliseconds, number
from shared import make_parser

DRAFT_LENGTH = 16
OUTCOMES = DRAFT_LENGTH + 1
CONTEXT = 512
PRUNED_SHARE = 0.99
"""Least share of the acceptance length that the drafter of 31 of 36 layers keeps, as published."""


@dataclass(frozen=True)
class Claim:
    """A published figure. None: not told."""

    name: str
    target: DecoderShape
    drafter: DecoderShape
    acceptance_length: float | None
    speed_up: float | None


QWEN3_8B = MODELS["qwen3-8b"]
PRUNED_LENGTH = round(PRUNED_SHARE * 7.88, 2)
CLAIMS = (
    Claim("Qwen3-8B, D3D-8B", QWEN3_8B, MODELS["d3d-8b"], 7.88, 5.00),
    Claim("Qwen3-8B, D3D-31D-8B", QWEN3_8B, MODELS["d3d-31d-8b"], PRUNED_LENGTH, None),
    Claim("Qwen3-32B, D3D-8B", MODELS["qwen3-32b"], MODELS["d3d-8b"], 7.73, 5.71),
    Claim("Qwen3-8B, D3D-1.7B (SGLang)", QWEN3_8B, MODELS["d3d-1.7b"], None, 3.717),
)
"""The drafter of the 32 B figure is not told; the large one is assumed. The SGLang figure is the
published aggregate."""


@dataclass(frozen=True)
class Explained:
    """A claim modelled on two devices of one kind. Times in seconds; None if the claim lacks what
    is needed."""

    claim: Claim
    device: DataSheet
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
        """Speed-up over plain, as in what follows."""
        return self._speed_up(self.round_s)

    @property
    def no_hits(self) -> float | None:
        return self._speed_up(self.round_s + self.fresh_s)

    @property
    def serial(self) -> float | None:
        return self._speed_up(self.verify_s + self.fresh_s)

    @property
    def published_round_s(self) -> float | None:
        """Length of a round if plain is as modelled, and acceptance and speed-up as published."""
        if self.claim.acceptance_length is None or self.claim.speed_up is None:
            return None
        return self.claim.acceptance_length * self.plain_s / self.claim.speed_up

    @property
    def open_s(self) -> float | None:
        """The published round without the modelled one with all hits; negative if it is shorter."""
        return None if self.published_round_s is None else self.published_round_s - self.round_s

    @property
    def hit_rate(self) -> float | None:
        """The hit rate at which misses alone explain the published round; outside of 0 and 1 if
        they can't."""
        return None if self.open_s is None else 1 - self.open_s / self.fresh_s

    @property
    def needed_acceptance(self) -> float | None:
        """The acceptance length at which all hits give the published speed-up."""
        if self.claim.speed_up is None:
            return None
        return self.claim.speed_up * self.round_s / self.plain_s

    def _speed_up(self, round_s: float) -> float | None:
        if self.claim.acceptance_length is None:
            return None
        return self.claim.acceptance_length * self.plain_s / round_s


def explain(
    claim: Claim, device: DataSheet, reached: Efficiency, outcomes: int = OUTCOMES
) -> Explained:
    """Raises InvalidRequest if the weights do not fit."""
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


def explain_all(reached: Efficiency, outcomes: int = OUTCOMES) -> list[Explained]:
    devices = [DATA_SHEETS[name] for name in ("h100", "h200", "a100")]
    return [explain(claim, device, reached, outcomes) for claim in CLAIMS for device in devices]


HEADINGS = (
    "target, drafter",
    "devices",
    "plain ms",
    "verify ms",
    "packed ms",
    "accepted, published",
    "speed-up, published",
    "all hits",
    "no hits",
    "serial",
    "round, published",
    "round, all hits",
    "hit rate",
    "accepted, needed",
)


def table(explained: list[Explained], outcomes: int) -> Table:
    """The published speed-ups beside the model's."""
    rows = []
    for each in explained:
        published = each.published_round_s
        implied = None if published is None else published / each.plain_s
        figures = (
            each.claim.acceptance_length,
            each.claim.speed_up,
            each.all_hits,
            each.no_hits,
            each.serial,
            implied,
            each.round_s / each.plain_s,
            each.hit_rate,
            each.needed_acceptance,
        )
        passes = (each.plain_s, each.verify_s, each.packed_s)
        rows.append(
            (
                each.claim.name,
                f"2 {each.device.name}",
                *(milliseconds(seconds, 2) for seconds in passes),
                *(number(figure) for figure in figures),
            )
        )
    note = (
        "Published: acceptance length and speed-up; all else is modelled, for drafts of "
        f"{DRAFT_LENGTH}, {outcomes} outcomes and {CONTEXT} tokens of context in bfloat16. "
        "Accepted: acceptance length; needed: at which all hits would give the published speed-up. "
        "Rounds in plain steps. Hit rate: at which misses alone would explain the published round; "
        "above 1 it is shorter than the model's, below 0 misses are not enough."
    )
    return Table("Published speed-ups and the model (modelled)", HEADINGS, tuple(rows), note)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--outcomes", type=int, default=OUTCOMES)
    parser.add_argument("--bandwidth-share", type=float, default=Efficiency.bandwidth_share)
    parser.add_argument("--arithmetic-share", type=float, default=Efficiency.arithmetic_share)
    parser.add_argument("--overhead-ms", type=float, default=1000 * Efficiency.overhead_s)
    parser.add_argument("--switch-ms", type=float, default=1000 * Efficiency.switch_s)
    options = parser.parse_args()
    reached = Efficiency(
        options.bandwidth_share,
        options.arithmetic_share,
        options.overhead_ms / 1000,
        options.switch_ms / 1000,
    )
    print(markdown(table(explain_all(reached, options.outcomes), options.outcomes)))


if __name__ == "__main__":
    main()
