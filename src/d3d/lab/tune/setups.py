"""What can be chosen: ways to decode, and the space of all of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from d3d.decoding.modes import ModeOptions, option_name
from d3d.methods.async_.config import DEFAULT_OUTCOMES
from d3d.methods.base import DEFAULT_DRAFT_LENGTH
from d3d.methods.fused.config import DEFAULT_FUSED_DRAFT_LENGTH

MOST_DRAFT = 16
MOST_STEPS = 3
MOST_ROWS = 32
MOST_OUTCOMES_TRIED = 16
CONFIDENCES = (0.02, 0.7)
"""Thresholds below or above these cut nearly nothing, or nearly all."""
LOOKUPS = (0, 2, 4)
"""Shortest runs of tokens that are looked up; 0 looks nothing up."""
LEAST_KEPT = (0.0, 0.8)
SPARED_NOTHING = {"serial.lookup": 0, "serial.least_kept": 0.0, "fused.lookup": 0}
"""What trials had that were made before these could be chosen."""
MISS_POLICIES = ("draft_now", "bonus_only")
FIRST_CONFIDENCE = 0.12
"""A row of a verification costs about that share of a token where there is no reason to think
otherwise."""

NO_OPTIONS = ModeOptions()

OWN = "own"
"""Name of the drafter that the target brings."""

MODES = ("serial", "fused", "async")
"""Modes that draft, and can be tuned."""


@dataclass(frozen=True)
class Setup:
    """One way to decode."""

    mode: str
    drafter: str | None = None
    """One of those that were given, or OWN; None in plain mode."""
    threads: int | None = None
    """None leaves torch's setting alone."""
    options: ModeOptions = NO_OPTIONS

    @property
    def key(self) -> str:
        """The same for equal setups, and readable: JSON."""
        return json.dumps(
            {"mode": self.mode, "drafter": self.drafter, "threads": self.threads, **self.told}
        )

    @property
    def told(self) -> dict[str, Any]:
        """The options that it has."""
        return {name: value for name, value in self.options._asdict().items() if value is not None}

    @property
    def is_adaptive(self) -> bool:
        return self.options.draft_confidence is not None

    def __str__(self) -> str:
        parts = [f"{option_name(name)} {value}" for name, value in self.told.items()]
        parts += (
            [f"{self.threads} thread{'s' if self.threads > 1 else ''}"]
            if self.threads is not None
            else []
        )
        parts += [self.drafter] if self.drafter not in (None, OWN) else []
        return ", ".join([self.mode, *parts])


class DrafterFacts(NamedTuple):
    """What a drafter can do."""

    name: str
    block_size: int
    longest_fused: int = 0
    """Most tokens that it drafts in fused mode; 0 where it has none."""


@dataclass(frozen=True)
class Space:
    """What is searched."""

    modes: tuple[str, ...]
    drafters: tuple[DrafterFacts, ...]
    threads: tuple[int, ...] = ()
    """None: the number of threads is left alone."""
    placements: tuple[str, ...] = ("thread",)

    @property
    def ways(self) -> list[str]:
        """Modes with the drafters that can serve them, as names."""
        return [
            f"{mode} {drafter.name}"
            for drafter in self.drafters
            for mode in self.modes
            if mode != "fused" or drafter.longest_fused
        ]

    def way(self, name: str) -> tuple[str, DrafterFacts]:
        mode, _, drafter = name.partition(" ")
        return mode, next(facts for facts in self.drafters if facts.name == drafter)


class Suggesting(Protocol):
    """Of an optuna trial, what is used."""

    def suggest_categorical(self, name: str, choices: Sequence[Any]) -> Any: ...
    def suggest_int(
        self, name: str, low: int, high: int, *, step: int = 1, log: bool = False
    ) -> int: ...
    def suggest_float(self, name: str, low: float, high: float, *, log: bool = False) -> float: ...


def suggested(trial: Suggesting, space: Space) -> Setup:
    """A point of the space. A parameter's range is the same for every drafter; what is too long for
    one is cut to what it can."""
    mode, drafter = space.way(trial.suggest_categorical("way", space.ways))
    threads = trial.suggest_categorical("threads", space.threads) if space.threads else None
    longest = min(MOST_DRAFT, max(facts.block_size for facts in space.drafters))
    if mode == "fused":
        fused_length = min(
            trial.suggest_int("fused.draft_length", 1, longest), drafter.longest_fused
        )
        rows = trial.suggest_int("fused.rows", 4, MOST_ROWS, step=2)
        lookup = trial.suggest_categorical("fused.lookup", LOOKUPS) or None
        unlimited = (
            lookup is not None and fused_length == drafter.longest_fused
        )  # copies may be longer than what slots can draft
        return Setup(
            mode,
            drafter.name,
            threads,
            ModeOptions(None if unlimited else fused_length, rows=rows, lookup=lookup),
        )
    length = min(trial.suggest_int(f"{mode}.draft_length", 1, longest), drafter.block_size)
    if mode == "async":
        return Setup(mode, drafter.name, threads, _async_options(trial, space, length))
    confidence = None
    if trial.suggest_categorical("serial.adaptive", (False, True)):
        confidence = round(
            trial.suggest_float("serial.draft_confidence", *CONFIDENCES, log=True), 3
        )
    steps = min(trial.suggest_int("serial.num_denoise_steps", 1, MOST_STEPS), length)
    lookup = trial.suggest_categorical("serial.lookup", LOOKUPS) or None
    least_kept = trial.suggest_categorical("serial.least_kept", LEAST_KEPT) or None
    options = ModeOptions(
        length, steps, draft_confidence=confidence, lookup=lookup, least_kept=least_kept
    )
    return Setup(mode, drafter.name, threads, options)


def _async_options(trial: Suggesting, space: Space, length: int) -> ModeOptions:
    return ModeOptions(
        length,
        outcomes=trial.suggest_int("async.outcomes", 1, MOST_OUTCOMES_TRIED, log=True),
        miss_policy=trial.suggest_categorical("async.miss_policy", MISS_POLICIES),
        placement=trial.suggest_categorical("async.placement", space.placements),
    )


def starting_points(space: Space, threads: int) -> list[dict[str, Any]]:
    """Where the search begins: each way as it is by default, and serial with an adaptive draft
    length, and with lookup and pauses. `threads`: what torch takes by itself."""
    longest = min(MOST_DRAFT, max(facts.block_size for facts in space.drafters))
    common = {"threads": threads} if space.threads else {}
    serial = {
        "serial.draft_length": min(DEFAULT_DRAFT_LENGTH, longest),
        "serial.adaptive": False,
        "serial.num_denoise_steps": 1,
        "serial.lookup": 0,
        "serial.least_kept": 0.0,
    }
    adaptive = {
        "serial.draft_length": min(8, longest),
        "serial.adaptive": True,
        "serial.draft_confidence": FIRST_CONFIDENCE,
    }
    own: dict[str, list[dict[str, Any]]] = {
        "serial": [
            serial,
            serial | adaptive,
            serial | {"serial.lookup": 2, "serial.least_kept": 0.8},
        ],
        "fused": [
            {
                "fused.draft_length": min(DEFAULT_FUSED_DRAFT_LENGTH, longest),
                "fused.rows": 12,
                "fused.lookup": 0,
            }
        ],
        "async": [
            {
                "async.draft_length": min(DEFAULT_DRAFT_LENGTH, longest),
                "async.outcomes": DEFAULT_OUTCOMES,
                "async.miss_policy": MISS_POLICIES[0],
                "async.placement": space.placements[0],
            }
        ],
    }
    return [
        {"way": way, **common, **point} for way in space.ways for point in own[way.split(" ")[0]]
    ]
