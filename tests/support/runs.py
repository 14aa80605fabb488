"""Run the decoding loop on tiny targets, and look at everything that it did."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedTokenizerFast

from d3d.engine.drafter import Draft, Drafter, Target
from d3d.engine.engine import Engine
from d3d.engine.request import Request, new_request
from d3d.engine.round import Round, TokenLogprob
from d3d.engine.sampling import LogitRows, SamplingParams

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
    events: list[Round] = field(default_factory=list)
    """Its rounds, and before them the prefill's first token."""

    @property
    def ids(self) -> list[int]:
        return self.request.answer_ids

    @property
    def token_ids(self) -> list[int]:
        """Prompt and answer."""
        return list(self.request.token_ids)

    @property
    def text(self) -> str:
        return "".join(event.text for event in self.events)

    @property
    def finish_reason(self) -> str | None:
        return self.request.finish_reason

    @property
    def logprobs(self) -> list[TokenLogprob]:
        return [entry for event in self.events for entry in event.logprobs]

    @property
    def rounds(self) -> list[Round]:
        return [event for event in self.events if event.number]

    @property
    def faults(self) -> list[str]:
        return [event.fault for event in self.events if event.fault is not None]


def make(
    target: Target,
    prompt: list[int] = PROMPT,
    *,
    eos: set[int] | None = None,
    tokenizer: Any = None,
    **params: Any,
) -> Run:
    eos_token_ids = frozenset(eos or ())
    return Run(
        new_request(
            target,
            prompt,
            SamplingParams(**params),
            eos_token_ids=eos_token_ids,
            tokenizer=tokenizer,
        )
    )


def rounds_of(
    target: Target,
    drafter: Drafter | None,
    runs: Sequence[Run],
    draft_length: int | None = None,
    max_batch: int | None = None,
    **options: Any,
) -> Iterator[Round]:
    """Decode them together, round by round. draft_length: drafts are cut to it; 0 is plain."""
    if drafter is not None and draft_length is not None:
        drafter.max_draft_length = min(drafter.max_draft_length, draft_length)
    engine = Engine(target, drafter, max_batch=max_batch, **options)
    by_id = {run.request.id: run for run in runs}
    for one in engine.run([run.request for run in runs]):
        by_id[one.request_id].events.append(one)
        yield one
    assert target.num_held == 0, "the target keeps nothing of a request that has ended"
    assert drafter is None or drafter.num_held == 0, "nor does the drafter"


def run_all(
    target: Target,
    drafter: Drafter | None,
    runs: list[Run],
    draft_length: int | None = None,
    max_batch: int | None = None,
    **options: Any,
) -> list[Run]:
    """Decode them together."""
    for _ in rounds_of(target, drafter, runs, draft_length, max_batch, **options):
        pass
    return runs


def run(
    target: Target,
    drafter: Drafter | None = None,
    prompt: list[int] = PROMPT,
    *,
    draft_length: int | None = None,
    eos: set[int] | None = None,
    tokenizer: PreTrainedTokenizerFast | None = None,
    **params: Any,
) -> Run:
    """Decode one request alone; plain without a drafter."""
    runs = [make(target, prompt, eos=eos, tokenizer=tokenizer, **params)]
    return run_all(target, drafter, runs, draft_length)[0]


class Watched(Target):
    """A target that notes what reaches it."""

    def __init__(self, target: Target) -> None:
        self.inner = target
        self.fed: list[list[list[int]]] = []
        """Token ids of each verification: anchors and drafts."""
        self.lengths: list[list[int]] = []
        """Committed tokens minus the anchor, after each round."""
        self.ended: list[int] = []
        """Ids of requests that have left."""

    @property
    def vocab_size(self) -> int:
        return self.inner.vocab_size

    @property
    def max_length(self) -> int:
        return self.inner.max_length

    @property
    def num_held(self) -> int:
        return self.inner.num_held

    def cache_for(self, model: Any) -> Any:
        return self.inner.cache_for(model)

    def prefill(self, requests: Sequence[Request], num_rows: int) -> list[LogitRows | None]:
        return self.inner.prefill(requests, num_rows)

    def verify(self, requests: Sequence[Request], drafts: Sequence[Draft]) -> list[LogitRows]:
        pairs = zip(requests, drafts, strict=True)
        self.fed.append([[request.anchor, *draft.token_ids] for request, draft in pairs])
        return self.inner.verify(requests, drafts)

    def rewind(self, requests: Sequence[Request]) -> None:
        self.inner.rewind(requests)
        self.lengths.append([len(request) - 1 for request in requests])

    def end(self, request: Request) -> None:
        self.inner.end(request)
        self.ended.append(request.id)
