"""What a generation was: typed records, made from the loop's events."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field
from typing import Any

from d3d.core.types import FinishReason, RoundStats, TokenLogprob
from d3d.decoding.loop import Event

HOPELESS_ROUNDS = 32
"""After this many drafted rounds without one kept token something is wrong with the drafter."""


@dataclass(frozen=True)
class Usage:
    """Token counts; the answer's includes an EOS or the token that completed a stop."""

    prompt_tokens: int
    completion_tokens: int


@dataclass(frozen=True)
class Timing:
    """Seconds from the request to its first token, mean seconds per further token, and tokens per second in all."""

    ttft_s: float
    tpot_s: float | None
    """None for an answer of one token."""
    tokens_per_s: float


@dataclass(frozen=True)
class Speculation:
    """What drafting did; the first token, which the prefill gives, belongs to no round."""

    mode: str
    rounds: int
    acceptance_length: float
    """Tokens committed by rounds / rounds."""
    acceptance_rate: float
    """Share of drafted tokens that were kept."""
    acceptance_at: tuple[float, ...]
    """Share of rounds in which drafted token 1, 2, ... was kept."""
    num_accepted_histogram: tuple[int, ...]
    """Rounds by num_accepted, from 0."""
    draft_length: int
    num_denoise_steps: int
    warnings: tuple[str, ...] = ()


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
    """Which tokens the drafter proposed and the target kept; the others the target wrote itself."""
    logprobs: tuple[TokenLogprob, ...] = ()
    seed: int | None = None
    """What repeats a sampled answer; None for a greedy one."""

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        fields = asdict(self)
        fields["logprobs"] = [
            {"token_id": p.token_id, "logprob": p.logprob, "top": [list(pair) for pair in p.top]} for p in self.logprobs
        ] or None
        return fields


@dataclass(frozen=True)
class StreamChunk:
    """What one round added: text (perhaps none yet) and ids; the last chunk carries the result."""

    text: str
    token_ids: tuple[int, ...]
    num_accepted: int
    """How many of the ids, from the first, the drafter had proposed."""
    result: GenerationResult | None = None


@dataclass
class Recorder:
    """Gathers the events of one request."""

    prompt_tokens: int
    mode: str
    draft_length: int
    num_denoise_steps: int = 1
    seed: int | None = None
    started: float = field(default_factory=time.perf_counter)
    _texts: list[str] = field(default_factory=list)
    _token_ids: list[int] = field(default_factory=list)
    _drafted: list[bool] = field(default_factory=list)
    _logprobs: list[TokenLogprob] = field(default_factory=list)
    _rounds: list[RoundStats] = field(default_factory=list)
    _warnings: list[str] = field(default_factory=list)
    _first: float = 0.0

    def add(self, event: Event) -> StreamChunk:
        """Take an event; the chunk for the reader."""
        now = time.perf_counter()
        if not self._token_ids:
            self._first = now
        verdict = event.verdict
        self._texts.append(event.text)
        self._token_ids += verdict.token_ids
        self._drafted += [place < verdict.num_accepted for place in range(len(verdict.token_ids))]
        self._logprobs += verdict.logprobs
        if event.stats is not None:
            self._rounds.append(event.stats)
        if event.fault is not None:
            self._warnings.append(f"drafting stopped: {event.fault}; the rest was decoded plainly")
        result = None if event.finish_reason is None else self._result(event.finish_reason, now)
        return StreamChunk(event.text, verdict.token_ids, verdict.num_accepted, result)

    def _result(self, reason: FinishReason, now: float) -> GenerationResult:
        count = len(self._token_ids)
        total, first = now - self.started, self._first - self.started
        return GenerationResult(
            text="".join(self._texts),
            token_ids=tuple(self._token_ids),
            finish_reason=reason,
            usage=Usage(self.prompt_tokens, count),
            timing=Timing(first, (total - first) / (count - 1) if count > 1 else None, count / total),
            speculation=None if self.mode == "plain" else self._speculation(),
            drafted=tuple(self._drafted),
            logprobs=tuple(self._logprobs),
            seed=self.seed,
        )

    def _speculation(self) -> Speculation:
        rounds, kept = len(self._rounds), [stats.num_accepted for stats in self._rounds]
        drafted = sum(stats.draft_length for stats in self._rounds)
        longest = max((stats.draft_length for stats in self._rounds), default=0)
        drafted_rounds = sum(stats.draft_length > 0 for stats in self._rounds)
        warnings = list(self._warnings)
        if drafted_rounds >= HOPELESS_ROUNDS and not any(kept):
            warnings.append(
                f"not one drafted token was kept in {drafted_rounds} rounds: this drafter does not fit the target; --mode plain is faster"
            )
        return Speculation(
            mode=self.mode,
            rounds=rounds,
            acceptance_length=sum(stats.num_committed for stats in self._rounds) / rounds if rounds else 0.0,
            acceptance_rate=sum(kept) / drafted if drafted else 0.0,
            acceptance_at=tuple(sum(k >= j for k in kept) / rounds for j in range(1, longest + 1)),
            num_accepted_histogram=tuple(kept.count(k) for k in range(longest + 1)),
            draft_length=self.draft_length,
            num_denoise_steps=self.num_denoise_steps,
            warnings=tuple(warnings),
        )
