"""Results of generation: typed records, built from rounds."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from d3d.engine import metrics
from d3d.engine.drafter import Drafter
from d3d.engine.request import Request
from d3d.engine.round import FinishReason, Round, TokenLogprob
from d3d.methods.auto.chooser import AutoReport
from d3d.methods.base import MethodConfig

HOPELESS_ROUNDS = 32
"""After this many drafted rounds without one kept token, warn about the drafter."""


@dataclass(frozen=True)
class Usage:
    """Token counts; the answer's includes an EOS or the token that completed a stop."""

    prompt_tokens: int
    completion_tokens: int


@dataclass(frozen=True)
class Timing:
    """Time to first token, mean seconds per further token, and overall tokens per second."""

    ttft_s: float
    tpot_s: float | None
    """None for an answer of one token."""
    tokens_per_s: float


@dataclass(frozen=True)
class Speculation:
    """Figures of speculative decoding. The first token comes from prefill and belongs to no
    round."""

    mode: str
    rounds: int
    acceptance_length: float
    """Tokens committed by rounds / rounds."""
    acceptance_rate: float
    """Share of drafted tokens that were kept."""
    acceptance_at: tuple[float, ...]
    """Share of rounds in which drafted token 1, 2, ..., draft_length was kept."""
    num_accepted_histogram: tuple[int, ...]
    """Rounds by num_accepted, 0 to draft_length."""
    undrafted_rounds: int
    """Rounds that verified the anchor only: drafting paused, or (fused mode) slots were worth more
    rows than the draft, or were left out."""
    draft_length: int
    num_denoise_steps: int
    warnings: tuple[str, ...] = ()
    overlap: metrics.Overlap | None = None
    """Async mode only, and auto mode that has tried it."""
    choice: AutoReport | None = None
    """Auto mode only."""
    lookup_rounds: int = 0
    """Rounds whose draft was copied from the text itself."""
    looks_up: bool = False
    """True if prompt lookup was on."""
    may_pause: bool = False
    """True if drafting could pause."""

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values. `undrafted_rounds` is included in fused and auto mode and if drafting
        could pause; `lookup_rounds` if prompt lookup was on; the fields of `Overlap` if measured;
        `auto` (an `AutoReport`) in auto mode."""
        fields: dict[str, Any] = {
            "mode": self.mode,
            "rounds": self.rounds,
            "acceptance_length": self.acceptance_length,
            "acceptance_rate": self.acceptance_rate,
            "acceptance_at": list(self.acceptance_at),
            "num_accepted_histogram": list(self.num_accepted_histogram),
        }
        if self.overlap is not None:
            fields |= self.overlap.to_dict()
        if self.mode in ("fused", "auto") or self.may_pause:
            fields["undrafted_rounds"] = self.undrafted_rounds
        if self.looks_up:
            fields["lookup_rounds"] = self.lookup_rounds
        return fields if self.choice is None else fields | {"auto": self.choice.to_dict()}


@dataclass(frozen=True)
class GenerationResult:
    """One answer."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    usage: Usage
    timing: Timing
    speculation: Speculation | None
    """None in plain mode."""
    drafted: tuple[bool, ...]
    """For each token: True if it was drafted and kept, False if the target wrote it."""
    logprobs: tuple[TokenLogprob, ...] = ()
    seed: int | None = None
    """Seed that reproduces a sampled answer; None for a greedy one."""
    thinking: bool | None = None
    """`enable_thinking` as passed to the chat template; None if it was not set."""
    quantize: str | None = None
    """Weight quantization, such as "int8"; None if there is none."""
    rounds: tuple[Round, ...] = ()
    """All rounds in order; `d3d.engine.trace.chrome_trace` exports them."""

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values, as `d3d generate --json` prints them.

        Always text, token_ids, finish_reason, usage, timing and speculation; logprobs if requested;
        seed of a sampled answer; thinking and quantize if set; warnings if there are any."""
        fields: dict[str, Any] = {
            "text": self.text,
            "token_ids": list(self.token_ids),
            "finish_reason": self.finish_reason,
            "usage": asdict(self.usage),
            "timing": asdict(self.timing),
            "speculation": None if self.speculation is None else self.speculation.to_dict(),
        }
        if self.logprobs:
            fields["logprobs"] = [
                {
                    "token_id": p.token_id,
                    "logprob": p.logprob,
                    "top": [list(pair) for pair in p.top],
                }
                for p in self.logprobs
            ]
        optional = (("seed", self.seed), ("thinking", self.thinking), ("quantize", self.quantize))
        fields |= {name: value for name, value in optional if value is not None}
        if self.speculation is not None and self.speculation.warnings:
            fields["warnings"] = list(self.speculation.warnings)
        return fields


@dataclass(frozen=True)
class StreamChunk:
    """Text (possibly empty) and token ids of one round; the last chunk carries the result."""

    text: str
    token_ids: tuple[int, ...]
    num_accepted: int
    """Number of leading ids that were drafted."""
    result: GenerationResult | None = None
    logprobs: tuple[TokenLogprob, ...] = ()
    """One per token, if requested."""


@dataclass(frozen=True)
class Settings:
    """Request settings that the result reports."""

    mode: str
    draft_length: int = 0
    num_denoise_steps: int = 1
    seed: int | None = None
    thinking: bool | None = None
    quantize: str | None = None
    report: Callable[[], AutoReport | None] | None = None
    """Called at the end for auto mode's choices."""
    looks_up: bool = False
    may_pause: bool = False


def settings_of(
    config: MethodConfig,
    drafter: Drafter,
    request: Request,
    thinking: bool | None,
    quantize: str | None,
) -> Settings:
    """Settings of a request, for its result."""
    return Settings(
        config.method,
        drafter.max_draft_length,
        getattr(config, "num_denoise_steps", None) or 1,
        None if request.params.greedy else request.seed,
        thinking,
        quantize,
        drafter.report,
        looks_up=bool(getattr(config, "lookup", None)) or config.method == "ngram",
        may_pause=bool(getattr(config, "least_kept", None)),
    )


@dataclass
class Recorder:
    """Collects the rounds of one request. Its clock starts when it is created."""

    prompt_tokens: int
    settings: Settings
    _started: float = field(default_factory=time.perf_counter)
    _first: float | None = None
    _texts: list[str] = field(default_factory=list)
    _token_ids: list[int] = field(default_factory=list)
    _drafted: list[bool] = field(default_factory=list)
    _logprobs: list[TokenLogprob] = field(default_factory=list)
    _rounds: list[Round] = field(default_factory=list)
    _faults: list[str] = field(default_factory=list)

    def add(self, round_: Round) -> StreamChunk:
        """Add a round (or the prefill's first token) and return its chunk."""
        now = time.perf_counter()
        if self._first is None:
            self._first = now
        self._texts.append(round_.text)
        self._token_ids += round_.token_ids
        self._drafted += [place < round_.num_accepted for place in range(len(round_.token_ids))]
        self._logprobs += round_.logprobs
        if round_.number:
            self._rounds.append(round_)
        if round_.fault is not None:
            self._faults.append(round_.fault)
        result = None if round_.finish_reason is None else self.result(round_.finish_reason)
        return StreamChunk(
            round_.text, round_.token_ids, round_.num_accepted, result, round_.logprobs
        )

    def result(self, reason: FinishReason) -> GenerationResult:
        """Result of the answer so far."""
        now = time.perf_counter()
        first = now if self._first is None else self._first
        count, total, ttft = len(self._token_ids), now - self._started, first - self._started
        timing = Timing(ttft, metrics.tpot_s(total, ttft, count), metrics.ratio(count, total))
        settings = self.settings
        is_plain = settings.mode == "plain"
        return GenerationResult(
            text="".join(self._texts),
            token_ids=tuple(self._token_ids),
            finish_reason=reason,
            usage=Usage(self.prompt_tokens, count),
            timing=timing,
            speculation=None if is_plain else speculation(settings, self._rounds, self._faults),
            drafted=tuple(self._drafted),
            logprobs=tuple(self._logprobs),
            seed=settings.seed,
            thinking=settings.thinking,
            quantize=settings.quantize,
            rounds=tuple(self._rounds),
        )


def speculation(
    settings: Settings, rounds: Sequence[Round], faults: Sequence[str] = ()
) -> Speculation:
    """Figures of a generation's rounds; zeros if there are none."""
    choice = None if settings.report is None else settings.report()
    has_async = settings.mode == "async" or any(round_.preparation is not None for round_ in rounds)
    counts = metrics.histogram(rounds, settings.draft_length)
    return Speculation(
        mode=settings.mode,
        rounds=len(rounds),
        acceptance_length=metrics.acceptance_length(rounds),
        acceptance_rate=metrics.acceptance_rate(rounds),
        acceptance_at=metrics.acceptance_at(counts),
        num_accepted_histogram=counts,
        undrafted_rounds=sum(round_.draft_length == 0 for round_ in rounds),
        lookup_rounds=sum(round_.looked_up for round_ in rounds),
        draft_length=settings.draft_length,
        num_denoise_steps=settings.num_denoise_steps,
        warnings=tuple(_warnings(rounds, faults, choice)),
        overlap=metrics.overlap(rounds, settings.draft_length) if has_async else None,
        choice=choice,
        looks_up=settings.looks_up,
        may_pause=settings.may_pause,
    )


def _warnings(
    rounds: Sequence[Round], faults: Sequence[str], choice: AutoReport | None
) -> Iterator[str]:
    for fault in faults:
        yield f"drafting stopped: {fault}; the rest was decoded plainly"
    for fault in () if choice is None else choice.faults:
        yield f"auto mode went on without {fault}"
    yield from dict.fromkeys(
        note
        for round_ in rounds
        if round_.preparation is not None
        for note in round_.preparation.notes
    )
    drafter_rounds = [round_ for round_ in rounds if round_.draft_length and not round_.looked_up]
    if (
        choice is None
        and len(drafter_rounds) >= HOPELESS_ROUNDS
        and not any(round_.num_accepted for round_ in drafter_rounds)
    ):
        yield (
            f"not one drafted token was kept in {len(drafter_rounds)} rounds: this drafter does "
            "not fit the target; --method plain is faster"
        )
