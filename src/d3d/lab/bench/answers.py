"""Questions and answers as all methods share them: our own, and other programs."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from pydantic import BaseModel, ConfigDict, Field

from d3d.engine.round import Round

PLAIN = "plain"
"""The method that all others are compared with."""


class Setting(BaseModel):
    """Request settings of an answer, shared by all compared methods."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_tokens: int = Field(ge=1)
    batch: int = Field(default=1, ge=1)
    draft_length: int | None = None
    """None for methods that don't draft."""

    @property
    def plain(self) -> Setting:
        """The setting of the plain answer to compare with."""
        return Setting(max_tokens=self.max_tokens, batch=self.batch)


class Sampling(NamedTuple):
    """Sampling settings, shared by a whole run."""

    temperature: float = 0.0
    seed: int = 0
    """Draws the prompts, and the noise of sampled answers."""
    ignore_eos: bool = False


@dataclass(frozen=True)
class MethodOptions:
    """Options of methods beyond target and drafter."""

    draft_model: str | None = None
    """Causal model that drafts for `draft_model`, and for `transformers_assistant` if `assistant`
    is None."""
    server_url: str | None = None
    server_model: str | None = None
    server_key: str | None = None
    gguf: str | None = None
    """File for llama.cpp; default: the target's own, if it is a GGUF file or a preset."""
    device: str = "auto"
    dtype: str = "auto"
    assistant: str | None = None
    """Causal model that drafts for `transformers_assistant`."""


class Question(NamedTuple):
    """A prompt as the target sees it."""

    token_ids: list[int]
    messages: list[dict[str, str]]


class Delivery(NamedTuple):
    """Tokens that reached the reader together, `at_s` seconds after the request."""

    at_s: float
    num_tokens: int


@dataclass(frozen=True)
class TimedAnswer:
    """An answer and the times of its deliveries."""

    text: str
    token_ids: tuple[int, ...] | None
    """None if a peer reports text only."""
    num_tokens: int
    finish_reason: str
    deliveries: tuple[Delivery, ...]
    rounds: tuple[Round, ...] | None = None
    """None for methods that run no rounds of ours."""
    wall_s: float = 0.0
    """Seconds from the request until the last answer of its batch was done."""
    warnings: tuple[str, ...] = ()
    modelled: bool = False
    """True if its times are modelled, not measured."""
    error: str | None = None
    """Reason why a peer's answer is not whole; such an answer is in no figure."""


class Peer(Protocol):
    """Another program, through its public interface: greedy, one question at a time."""

    def answer(self, question: Question, setting: Setting) -> TimedAnswer: ...

    def describe(self) -> dict[str, Any]:
        """Versions, files and threads, for the provenance."""
        ...

    def close(self) -> None: ...


@dataclass
class DeliveryTimer:
    """Records deliveries; its clock starts when it is created."""

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
