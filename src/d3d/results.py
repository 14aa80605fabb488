"""What a generation was: typed records, made from rounds."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from d3d.engine import metrics
from d3d.engine.round import FinishReason, Round, TokenLogprob
from d3d.methods.auto.chooser import AutoReport

HOPELESS_ROUNDS = 32
"""After this many drafted rounds without one kept token something is wrong with the drafter."""


@dataclass(frozen=True)
class Usage:
    """Token counts; the answer's includes an EOS or the token that completed a stop."""

    prompt_tokens: int
    completion_tokens: int


@dataclass(frozen=True)
class Timing:
    """Seconds from the request to its first token, mean seconds per further token, and tokens per
    second in all."""

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
    """Share of rounds in which drafted token 1, 2, ..., draft_length was kept."""
    num_accepted_histogram: tuple[int, ...]
    """Rounds by num_accepted, 0 to draft_length."""
    undrafted_rounds: int
    """Rounds in which only the anchor was verified: pauses; in fused mode those where slots
    promised more, or were left out."""
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
    """Whether drafts were to be copied from the text where it holds them."""
    may_pause: bool = False
    """Whether rounds were to go without a draft where recent ones had not paid."""

    def to_dict(self) -> dict[str, Any]:
        """The figures, as plain JSON values; `undrafted_rounds` in fused and auto mode, where it
        says what the budget of rows, or plain rounds, have cost, and where drafting may pause;
        `lookup_rounds` where drafts may be copied; those of `Overlap` where there are some; `auto`,
        a `AutoReport`, in auto mode."""
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
    """Which tokens were drafted and kept; the others the target wrote itself."""
    logprobs: tuple[TokenLogprob, ...] = ()
    seed: int | None = None
    """What repeats a sampled answer; None for a greedy one."""
    thinking: bool | None = None
    """What the chat template was told as `enable_thinking`; None where it was told nothing."""
    quantize: str | None = None
    """What the weights were rounded to; None: nothing."""
    rounds: tuple[Round, ...] = ()
    """What happened when, round by round; `d3d.decoding.timeline` draws figures and a trace from
    it."""

    def to_dict(self) -> dict[str, Any]:
        """What `d3d generate --json` prints, as plain JSON values.

        Always text, token_ids, finish_reason, usage, timing and speculation; besides, where there
        is something to say, logprobs (where asked for), seed (of a sampled answer), thinking (where
        set), quantize (of rounded weights) and warnings."""
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
        said = (("seed", self.seed), ("thinking", self.thinking), ("quantize", self.quantize))
        fields |= {name: value for name, value in said if value is not None}
        if self.speculation is not None and self.speculation.warnings:
            fields["warnings"] = list(self.speculation.warnings)
        return fields


@dataclass(frozen=True)
class StreamChunk:
    """What one round added: text (perhaps none yet) and ids; the last chunk carries the result."""

    text: str
    token_ids: tuple[int, ...]
    num_accepted: int
    """How many of the ids, from the first, had been drafted."""
    result: GenerationResult | None = None


@dataclass(frozen=True)
class Settings:
    """What a generation was asked for, as far as its result says so."""

    mode: str
    draft_length: int = 0
    num_denoise_steps: int = 1
    seed: int | None = None
    thinking: bool | None = None
    quantize: str | None = None
    report: Callable[[], AutoReport | None] | None = None
    """Asked at the end what auto mode has chosen."""
    looks_up: bool = False
    may_pause: bool = False


@dataclass
class Recorder:
    """Gathers the events of one request, from the moment at which it is made."""

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

    def add(self, one: Round) -> StreamChunk:
        """Take a round, or the prefill's first token; the chunk for the reader."""
        now = time.perf_counter()
        if self._first is None:
            self._first = now
        self._texts.append(one.text)
        self._token_ids += one.token_ids
        self._drafted += [place < one.num_accepted for place in range(len(one.token_ids))]
        self._logprobs += one.logprobs
        if one.number:
            self._rounds.append(one)
        if one.fault is not None:
            self._faults.append(one.fault)
        result = None if one.finish_reason is None else self.result(one.finish_reason)
        return StreamChunk(one.text, one.token_ids, one.num_accepted, result)

    def result(self, reason: FinishReason) -> GenerationResult:
        """What the answer has come to."""
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
    """The figures of a generation's rounds; zeros if there was none."""
    choice = None if settings.report is None else settings.report()
    has_async = settings.mode == "async" or any(one.preparation is not None for one in rounds)
    counts = metrics.histogram(rounds, settings.draft_length)
    return Speculation(
        mode=settings.mode,
        rounds=len(rounds),
        acceptance_length=metrics.acceptance_length(rounds),
        acceptance_rate=metrics.acceptance_rate(rounds),
        acceptance_at=metrics.acceptance_at(counts),
        num_accepted_histogram=counts,
        undrafted_rounds=sum(one.draft_length == 0 for one in rounds),
        lookup_rounds=sum(one.looked_up for one in rounds),
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
        for stats in rounds
        if stats.preparation is not None
        for note in stats.preparation.notes
    )
    of_drafter = [stats for stats in rounds if stats.draft_length and not stats.looked_up]
    if (
        choice is None
        and len(of_drafter) >= HOPELESS_ROUNDS
        and not any(stats.num_accepted for stats in of_drafter)
    ):
        yield (
            f"not one drafted token was kept in {len(of_drafter)} rounds: this drafter does not "
            "fit the target; --method plain is faster"
        )
