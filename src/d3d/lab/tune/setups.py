"""Setups: ways to decode, and the space of those that are searched."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from d3d.json_text import to_json
from d3d.methods.async_.config import DEFAULT_OUTCOMES, AsyncConfig, MissPolicy
from d3d.methods.base import DEFAULT_DRAFT_LENGTH, MethodConfig
from d3d.methods.fused.config import DEFAULT_FUSED_DRAFT_LENGTH, FusedConfig
from d3d.methods.plain.config import PlainConfig
from d3d.methods.serial.config import SerialConfig

MOST_DRAFT = 16
MOST_STEPS = 3
MOST_ROWS = 32
MOST_OUTCOMES_TRIED = 16
CONFIDENCES = (0.02, 0.7)
"""Thresholds outside of these cut nearly nothing, or nearly all."""
LOOKUPS = (0, 2, 4)
"""Shortest runs of tokens that prompt lookup matches; 0: no lookup."""
LEAST_KEPT = (0.0, 0.8)
SPARED_NOTHING = {"serial.lookup": 0, "serial.least_kept": 0.0, "fused.lookup": 0}
"""Parameters that older trials lack, with the values they had."""
MISS_POLICIES: tuple[MissPolicy, ...] = ("draft_now", "bonus_only")
FIRST_CONFIDENCE = 0.12
"""Start of the search: about the share of a token that a row of a verification costs."""
FIRST_ROWS = 12

PLAIN = PlainConfig()

OWN = "own"
"""Name of the drafter that the target brings."""

MODES = ("serial", "fused", "async")
"""Modes that draft, and can be tuned."""


@dataclass(frozen=True)
class Setup:
    """One way to decode."""

    config: MethodConfig = PLAIN
    drafter: str | None = None
    """A name that was given, or OWN; None in plain mode."""
    threads: int | None = None
    """None keeps torch's setting."""

    @property
    def mode(self) -> str:
        return self.config.method

    @property
    def given(self) -> dict[str, Any]:
        """The options that are set."""
        return self.config.model_dump(exclude={"method"}, exclude_none=True)

    @property
    def key(self) -> str:
        """JSON, the same for equal setups."""
        fields = {"mode": self.mode, "drafter": self.drafter, "threads": self.threads}
        return to_json({**fields, **self.given})

    @property
    def is_adaptive(self) -> bool:
        return "draft_confidence" in self.given

    def __str__(self) -> str:
        parts = [self.mode]
        for name, value in self.given.items():
            parts.append(f"{name.removeprefix('num_').replace('_', ' ')} {value}")
        if self.threads is not None:
            parts.append(f"{self.threads} thread{'s' if self.threads > 1 else ''}")
        if self.drafter not in (None, OWN):
            parts.append(str(self.drafter))
        return ", ".join(parts)


class DrafterFacts(NamedTuple):
    """A drafter's limits."""

    name: str
    block_size: int
    longest_fused: int = 0
    """Longest draft in fused mode; 0 if it has none."""


@dataclass(frozen=True)
class Space:
    """Search space."""

    modes: tuple[str, ...]
    drafters: tuple[DrafterFacts, ...]
    threads: tuple[int, ...] = ()
    """Empty: the number of threads is not searched."""
    placements: tuple[str, ...] = ("thread",)

    @property
    def ways(self) -> list[str]:
        """Names of modes with the drafters that can serve them."""
        return [
            f"{mode} {drafter.name}"
            for drafter in self.drafters
            for mode in self.modes
            if mode != "fused" or drafter.longest_fused
        ]

    def way(self, name: str) -> tuple[str, DrafterFacts]:
        mode, _, drafter = name.partition(" ")
        return mode, next(facts for facts in self.drafters if facts.name == drafter)

    @property
    def longest(self) -> int:
        """Longest draft to try."""
        return min(MOST_DRAFT, max(facts.block_size for facts in self.drafters))


class Suggesting(Protocol):
    """The part of an optuna trial that is used."""

    def suggest_categorical(self, name: str, choices: Sequence[Any]) -> Any: ...
    def suggest_int(
        self, name: str, low: int, high: int, *, step: int = 1, log: bool = False
    ) -> int: ...
    def suggest_float(self, name: str, low: float, high: float, *, log: bool = False) -> float: ...


def suggested(trial: Suggesting, space: Space) -> Setup:
    """A point of the space. Ranges are the same for every drafter; values beyond its limits are
    reduced to them."""
    mode, drafter = space.way(trial.suggest_categorical("way", space.ways))
    threads = trial.suggest_categorical("threads", space.threads) if space.threads else None
    length = trial.suggest_int(f"{mode}.draft_length", 1, space.longest)
    config: MethodConfig
    if mode == "fused":
        config = _fused(trial, min(length, drafter.longest_fused), drafter.longest_fused)
    elif mode == "async":
        config = _async(trial, space, min(length, drafter.block_size))
    else:
        config = _serial(trial, min(length, drafter.block_size))
    return Setup(config, drafter.name, threads)


def _serial(trial: Suggesting, length: int) -> SerialConfig:
    confidence = None
    if trial.suggest_categorical("serial.adaptive", (False, True)):
        threshold = trial.suggest_float("serial.draft_confidence", *CONFIDENCES, log=True)
        confidence = round(threshold, 3)
    steps = trial.suggest_int("serial.num_denoise_steps", 1, MOST_STEPS)
    return SerialConfig(
        draft_length=length,
        num_denoise_steps=min(steps, length),
        draft_confidence=confidence,
        lookup=trial.suggest_categorical("serial.lookup", LOOKUPS) or None,
        least_kept=trial.suggest_categorical("serial.least_kept", LEAST_KEPT) or None,
    )


def _fused(trial: Suggesting, length: int, longest: int) -> FusedConfig:
    rows = trial.suggest_int("fused.rows", 4, MOST_ROWS, step=2)
    lookup = trial.suggest_categorical("fused.lookup", LOOKUPS) or None
    is_unlimited = lookup is not None and length == longest  # copies may be longer than slots draft
    return FusedConfig(draft_length=None if is_unlimited else length, rows=rows, lookup=lookup)


def _async(trial: Suggesting, space: Space, length: int) -> AsyncConfig:
    return AsyncConfig(
        draft_length=length,
        outcomes=trial.suggest_int("async.outcomes", 1, MOST_OUTCOMES_TRIED, log=True),
        miss_policy=trial.suggest_categorical("async.miss_policy", MISS_POLICIES),
        placement=trial.suggest_categorical("async.placement", space.placements),
    )


def starting_points(space: Space, threads: int) -> list[dict[str, Any]]:
    """Start of the search: each way with its defaults, and serial with an adaptive draft length,
    and with lookup and pauses. threads: torch's own number."""
    serial = {
        "serial.draft_length": min(DEFAULT_DRAFT_LENGTH, space.longest),
        "serial.adaptive": False,
        "serial.num_denoise_steps": 1,
        "serial.lookup": 0,
        "serial.least_kept": 0.0,
    }
    adaptive = {
        "serial.draft_length": min(8, space.longest),
        "serial.adaptive": True,
        "serial.draft_confidence": FIRST_CONFIDENCE,
    }
    fused = {
        "fused.draft_length": min(DEFAULT_FUSED_DRAFT_LENGTH, space.longest),
        "fused.rows": FIRST_ROWS,
        "fused.lookup": 0,
    }
    asynchronous = {
        "async.draft_length": min(DEFAULT_DRAFT_LENGTH, space.longest),
        "async.outcomes": DEFAULT_OUTCOMES,
        "async.miss_policy": MISS_POLICIES[0],
        "async.placement": space.placements[0],
    }
    sparing = {"serial.lookup": 2, "serial.least_kept": 0.8}
    points: dict[str, list[dict[str, Any]]] = {
        "serial": [serial, serial | adaptive, serial | sparing],
        "fused": [fused],
        "async": [asynchronous],
    }
    common = {"threads": threads} if space.threads else {}
    return [
        {"way": way, **common, **point} for way in space.ways for point in points[way.split(" ")[0]]
    ]
