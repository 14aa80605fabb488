"""Sampling parameters. Imports no torch, so that `--help` is quick."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, model_validator

GREEDY_TEMPERATURE = 1e-5
"""Decoding is greedy at or below this temperature."""


class SamplingParams(BaseModel):
    """Parameters by which the target's next token is chosen. Unknown names are refused.

    `d3d.engine.sampling` documents the order in which they apply. Bounds keep float32 logits
    finite."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    temperature: float = Field(default=0.0, ge=0.0, le=1e4, description="0 is greedy")
    top_k: int = Field(default=0, ge=0, description="keep the k most likely tokens; 0 keeps all")
    top_p: float = Field(
        default=1.0, gt=0.0, le=1.0, description="keep the smallest set with this probability"
    )
    min_p: float = Field(
        default=0.0,
        ge=0.0,
        le=1.0,
        description="keep tokens at least this likely relative to the best",
    )
    repetition_penalty: float = Field(
        default=1.0, ge=0.01, le=100.0, description="over prompt and answer"
    )
    presence_penalty: float = Field(default=0.0, ge=-100.0, le=100.0, description="over the answer")
    frequency_penalty: float = Field(
        default=0.0, ge=-100.0, le=100.0, description="over the answer"
    )
    logit_bias: dict[int, Annotated[float, Field(ge=-1e6, le=1e6)]] = Field(
        default_factory=dict, description="token id to added logit"
    )
    min_tokens: int = Field(
        default=0, ge=0, description="no EOS or stop token before this many answer tokens"
    )
    max_tokens: int = Field(default=256, ge=1, description="longest answer in tokens")
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = Field(
        default=(), description="strings that end the answer; they may spell special tokens"
    )
    stop_token_ids: tuple[int, ...] = Field(default=(), description="token ids that end the answer")
    ignore_eos: bool = Field(default=False, description="go on past the model's own end tokens")
    seed: int | None = Field(
        default=None, ge=0, description="noise of the sampler; without one, a fresh one is drawn"
    )
    logprobs: int | None = Field(
        default=None, ge=0, le=64, description="report this many best alternatives a token"
    )

    @model_validator(mode="after")
    def _min_is_within_max(self) -> SamplingParams:
        if self.min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens ({self.min_tokens}) must not be above max_tokens ({self.max_tokens})"
            )
        return self

    @property
    def greedy(self) -> bool:
        return self.temperature <= GREEDY_TEMPERATURE

    @property
    def uses_counts(self) -> bool:
        """True if a penalty needs token counts."""
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )
