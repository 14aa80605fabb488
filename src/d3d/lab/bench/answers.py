"""What every method is given and gives back, whoever it is: our own modes, baselines behind our
loop, and other programs."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from pydantic import BaseModel, ConfigDict, Field

from d3d.core.types import RoundStats


class Setting(BaseModel):
    """How an answer was asked for; the same for all methods that are compared."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_tokens: int = Field(ge=1)
    batch: int = Field(default=1, ge=1)
    draft_length: int | None = None
    """None for methods that draft nothing."""


class Sampling(NamedTuple):
    """How tokens are chosen; one choice for a whole run."""

    temperature: float = 0.0
    seed: int = 0
    """Noise of sampled answers, and which prompts are drawn."""
    ignore_eos: bool = False


class Question(NamedTuple):
    """A prompt as the target sees it."""

    token_ids: list[int]
    messages: list[dict[str, str]]


class Delivery(NamedTuple):
    """Tokens that the reader was given together, and when, in seconds from the request."""

    at_s: float
    num_tokens: int


@dataclass(frozen=True)
class Answer:
    """One answer, as it was delivered."""

    text: str
    token_ids: tuple[int, ...] | None
    """None where a peer tells its text only."""
    num_tokens: int
    finish_reason: str
    deliveries: tuple[Delivery, ...]
    rounds: tuple[RoundStats, ...] | None = None
    """None for methods without rounds of ours."""
    wall_s: float = 0.0
    """Seconds from the request until all answers of its batch were done."""
    warnings: tuple[str, ...] = ()
    modelled: bool = False
    """Whether its times were modelled instead of measured."""


class Peer(Protocol):
    """Another program, through its public interface. It answers greedily, one question at a
    time."""

    def answer(self, question: Question, setting: Setting) -> Answer: ...

    def describe(self) -> dict[str, Any]:
        """What it is: versions, files, threads; for the provenance."""
        ...

    def close(self) -> None: ...


@dataclass
class Stopwatch:
    """Notes deliveries from the moment at which it is made."""

    _started: float = field(default_factory=time.perf_counter)
    _deliveries: list[Delivery] = field(default_factory=list)

    def deliver(self, num_tokens: int) -> None:
        if num_tokens > 0:
            self._deliveries.append(Delivery(self.elapsed(), num_tokens))

    def elapsed(self) -> float:
        return time.perf_counter() - self._started

    @property
    def deliveries(self) -> tuple[Delivery, ...]:
        return tuple(self._deliveries)
