"""The records that the parts exchange. All are frozen: whoever wants another value makes another
record."""

from __future__ import annotations

from typing import Annotated, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, model_validator

GREEDY_TEMPERATURE = 1e-5
"""At or below this temperature decoding is greedy, in every branch."""

FinishReason = Literal["stop", "length"]


class SamplingParams(BaseModel):
    """How the target's next token is chosen. Unknown names are refused.

    The order in which these act is documented in `d3d.acceptance.sampling`. Bounds keep float32
    logits finite."""

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
        default=(), description="strings that end the answer"
    )
    stop_token_ids: tuple[int, ...] = Field(default=(), description="token ids that end the answer")
    ignore_eos: bool = Field(default=False, description="go on past the model's own end tokens")
    seed: int | None = Field(
        default=None, ge=0, description="noise of the sampler; None draws a fresh one"
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
        """Whether a penalty needs to know how often each token has occurred."""
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )


class TokenLogprob(NamedTuple):
    """Log-probability (natural logarithm) of a committed token after all processing, and the best
    alternatives."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


class Outcome(NamedTuple):
    """A possible verdict."""

    num_accepted: int
    bonus_token: int


Readiness = Literal["hit", "late", "miss", "unprepared"]
"""Of the successor that a round wanted: there in time; waited for; not among those prepared; none
was being prepared (the first round, and rounds behind one for which the worker could not be
asked)."""


class Preparation(NamedTuple):
    """How a round of async mode came to its draft, or to none."""

    readiness: Readiness
    cause: str | None = None
    """Why the round has no draft; None where it has one, or wanted none."""
    passes: tuple[tuple[float, float], ...] = ()
    """Start and end of the drafter's work that has been heard of since the round before, in seconds
    of `time.perf_counter`."""
    notes: tuple[str, ...] = ()
    """What has happened to the draft worker since then, in words."""
    fitted: bool | None = None
    """Whether the draft is a successor that was prepared, in time or late; None where that is not
    known."""


class DraftBlock(NamedTuple):
    """Tokens proposed for the positions behind the anchor, at most block_size of them."""

    token_ids: tuple[int, ...] = ()
    fault: str | None = None
    """Why the drafter could not draft (for example non-finite logits); None when all is well."""
    preparation: Preparation | None = None
    """Async mode only."""
    confidences: tuple[float, ...] = ()
    """The probability that the drafter gave each token, given those before it; empty where nobody
    asked."""
    looked_up: bool = False
    """Whether it was copied from the text itself, and no model was asked."""
    num_slots: int = 0
    """Fused mode: slots of the pass that is to verify it."""


class Verdict(NamedTuple):
    """What the target decided about one draft. `bonus_token` is None only where a stop cut the
    round."""

    accepted: tuple[int, ...]
    bonus_token: int | None
    logprobs: tuple[TokenLogprob, ...] = ()
    """One entry per committed token where they were asked for, else empty."""

    @property
    def num_accepted(self) -> int:
        return len(self.accepted)

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The tokens that this round commits."""
        return self.accepted if self.bonus_token is None else (*self.accepted, self.bonus_token)


class RoundStats(NamedTuple):
    """One round as it happened. Times in seconds."""

    draft_length: int
    num_accepted: int
    num_committed: int
    t_draft: float
    """From the round's start until the draft is there. In async mode that is drafting that nothing
    hides."""
    t_verify: float
    started: float = 0.0
    """When the round began, in seconds of `time.perf_counter`."""
    preparation: Preparation | None = None
    """Async mode only."""
    device_span: tuple[float, float] | None = None
    """Start and end of the verification on a device that keeps its own time (CUDA), in seconds of
    `time.perf_counter`."""
    looked_up: bool = False
    """Whether the draft was copied from the text itself."""
    num_slots: int = 0
    """Fused mode: slots of the pass, beside its anchor and its drafted tokens."""
