"""Tuning without clocks: times that a formula gives, and models whose settings only matter to
it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from d3d.lab.tune.measure import CaseResult
from d3d.lab.tune.search import SearchPlan
from d3d.lab.tune.setups import OWN, DrafterFacts, Setup, Space

SPACE = Space(
    ("serial", "fused", "async"),
    (DrafterFacts(OWN, 16, 15), DrafterFacts("short", 4)),
    (1, 2, 4),
    ("thread", "processes"),
)


def plan(
    trials: int = 30, seed: int = 0, cases: int = 3, space: Space = SPACE, **identity: object
) -> SearchPlan:
    return SearchPlan(space, tuple(range(cases)), trials, seed, 2, dict(identity))


@dataclass
class Formula:
    """A measuring function: serial with a draft of 6, cut at 0.1, on 4 threads is the fastest by
    far."""

    asked: list[tuple[str, int]] = field(default_factory=list)
    """Keys of setups, and cases."""

    def __call__(self, setup: Setup, case: int) -> CaseResult:
        self.asked.append((setup.key, case))
        tokens = 50 + 10 * case
        cost = self.ms_per_token(setup) * (1 + 0.3 * case)
        rounds = 0 if setup.mode == "plain" else tokens // 3
        return CaseResult(
            cost * tokens / 1000, tokens, rounds, tokens if rounds else 0, f"answer {case}"
        )

    def ms_per_token(self, setup: Setup) -> float:
        slow = {1: 2.0, 2: 1.5, 4: 1.0, None: 1.5}[setup.threads]
        if setup.mode == "plain":
            return 10 * slow
        base = {"serial": 5.0, "fused": 8.0, "async": 12.0}[setup.mode]
        length = setup.given.get("draft_length") or 5
        confidence = setup.given.get("draft_confidence")
        steps = setup.given.get("num_denoise_steps") or 1
        cut = 0.8 if confidence is None else abs(confidence - 0.1)
        return slow * (base + 0.4 * abs(length - 6) + cut + 2 * (steps - 1))


def journal(directory: Path) -> Path:
    return directory / "search.log"
