"""Run the decoding loop on tiny targets, and look at everything that it did."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from transformers import PreTrainedTokenizerFast

from d3d.core.protocols import Drafter, TargetEngine, TargetSession
from d3d.core.types import RoundStats, SamplingParams, TokenLogprob
from d3d.decoding.loop import Event, decode
from d3d.decoding.request import Request, new_request

PROMPT = [5, 17, 80, 3, 41]

SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {},
    "temperature": {"temperature": 0.9, "seed": 3},
    "hot": {"temperature": 2.0, "seed": 42},
    "top_k": {"temperature": 1.0, "top_k": 5, "seed": 1},
    "top_p": {"temperature": 1.2, "top_p": 0.7, "seed": 2},
    "min_p": {"temperature": 1.5, "min_p": 0.1, "seed": 4},
    "greedy penalties": {
        "repetition_penalty": 1.4,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.7,
    },
    "sampled penalties": {
        "temperature": 0.8,
        "seed": 5,
        "repetition_penalty": 1.2,
        "frequency_penalty": -0.5,
        "presence_penalty": 1.0,
    },
    "bias": {"logit_bias": {7: 3.0, 20: -4.0, 55: 2.5}},
    "everything": {
        "temperature": 0.9,
        "seed": 6,
        "top_k": 30,
        "top_p": 0.9,
        "min_p": 0.02,
        "frequency_penalty": 0.5,
        "logit_bias": {9: 2.0},
    },
}
"""Ways to choose tokens, by name; all reproducible."""


@dataclass
class Run:
    """What one request has come to."""

    request: Request
    events: list[Event] = field(default_factory=list)

    @property
    def ids(self) -> list[int]:
        return self.request.sequence.answer_ids

    @property
    def token_ids(self) -> list[int]:
        """Prompt and answer."""
        return list(self.request.sequence.token_ids)

    @property
    def text(self) -> str:
        return "".join(event.text for event in self.events)

    @property
    def finish_reason(self) -> str | None:
        return self.request.sequence.finish_reason

    @property
    def logprobs(self) -> list[TokenLogprob]:
        return [entry for event in self.events for entry in event.verdict.logprobs]

    @property
    def rounds(self) -> list[RoundStats]:
        return [event.stats for event in self.events if event.stats is not None]

    @property
    def faults(self) -> list[str]:
        return [event.fault for event in self.events if event.fault is not None]


def make(
    engine: TargetEngine,
    prompt: list[int] = PROMPT,
    *,
    eos: set[int] | None = None,
    tokenizer: Any = None,
    **params: Any,
) -> Run:
    eos_token_ids = frozenset(eos or ())
    return Run(
        new_request(
            engine,
            prompt,
            SamplingParams(**params),
            eos_token_ids=eos_token_ids,
            tokenizer=tokenizer,
        )
    )


def run_all(
    engine: TargetEngine,
    drafter: Drafter | None,
    runs: list[Run],
    draft_length: int = 16,
    max_batch: int | None = None,
) -> list[Run]:
    """Decode them together."""
    for event in decode(
        engine, drafter, [run.request for run in runs], draft_length, max_batch=max_batch
    ):
        runs[event.index].events.append(event)
    return runs


def run(
    engine: TargetEngine,
    drafter: Drafter | None = None,
    prompt: list[int] = PROMPT,
    *,
    draft_length: int = 16,
    eos: set[int] | None = None,
    tokenizer: PreTrainedTokenizerFast | None = None,
    **params: Any,
) -> Run:
    """Decode one request alone; plain without a drafter."""
    return run_all(
        engine,
        drafter,
        [make(engine, prompt, eos=eos, tokenizer=tokenizer, **params)],
        draft_length,
    )[0]


class Watched:
    """A target engine that notes what reaches it."""

    def __init__(self, engine: TargetEngine) -> None:
        self.engine = engine
        self.fed: list[list[list[int]]] = []
        """Token ids of each pass."""
        self.lengths: list[list[int]] = []
        """Cached tokens after each crop."""
        self.num_kept: list[int] = []
        """Sequences left after each `keep`."""

    @property
    def vocab_size(self) -> int:
        return self.engine.vocab_size

    @property
    def max_length(self) -> int:
        return self.engine.max_length

    def open(self, num_sequences: int, capacity: int) -> TargetSession:
        return WatchedSession(self, self.engine.open(num_sequences, capacity))


class WatchedSession:
    def __init__(self, watched: Watched, session: TargetSession) -> None:
        self.watched, self.session = watched, session

    @property
    def lengths(self) -> list[int]:
        return self.session.lengths

    def forward(self, token_ids: list[list[int]], *, last_only: bool = False) -> list[Tensor]:
        self.watched.fed.append([list(ids) for ids in token_ids])
        return self.session.forward(token_ids, last_only=last_only)

    def crop(self, lengths: list[int]) -> None:
        self.session.crop(lengths)
        self.watched.lengths.append(list(self.session.lengths))

    def keep(self, rows: list[int]) -> None:
        self.session.keep(rows)
        self.watched.num_kept.append(len(rows))

    def join(self, count: int) -> None:
        self.session.join(count)
