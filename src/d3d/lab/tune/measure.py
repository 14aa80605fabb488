"""Measures setups: each answers a case, which is one prompt or several together."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch

from d3d.api import Model
from d3d.engine.engine import Engine
from d3d.engine.metrics import ratio
from d3d.engine.params import SamplingParams
from d3d.engine.request import new_request
from d3d.forks import set_num_threads
from d3d.hub.open_model import TargetModel
from d3d.lab.tune.setups import Setup
from d3d.lab.tune.traffic import ids_sha256
from d3d.methods.base import Built

WARM_UP_TOKENS = 8
"""The first passes of a setup are slower, and not measured."""

Case = Sequence[Sequence[int]]
"""Prompts, as token ids, that are answered together."""


class CaseResult(NamedTuple):
    """A case, answered with one setup."""

    seconds: float
    """Seconds after the first tokens."""
    tokens: int
    """After the first of each answer."""
    rounds: int = 0
    committed: int = 0
    answers_sha256: str = ""
    """Hash of all ids."""


def ms_per_token(results: Iterable[CaseResult]) -> float:
    """Milliseconds per token of all answers together, so concurrency lowers it."""
    results = list(results)
    return 1000 * ratio(sum(each.seconds for each in results), sum(each.tokens for each in results))


class Measurer(Protocol):
    """Answers cases."""

    def __call__(self, setup: Setup, case: int) -> CaseResult: ...


@dataclass
class EngineMeasurer:
    """Runs the engine. It changes torch's number of threads; `close` restores it, and ends
    what async mode has started."""

    models: Mapping[str, Model]
    """By the drafter's name; all with the same target."""
    cases: Sequence[Case]
    params: SamplingParams
    _warm: set[str] = field(default_factory=set)
    _threads: int = field(default_factory=torch.get_num_threads)

    def __call__(self, setup: Setup, case: int) -> CaseResult:
        """Raises InvalidRequest for an impossible setup, WorkerFailed if async mode does not come
        up."""
        name = next(iter(self.models)) if setup.drafter is None else setup.drafter
        model, prompts = self.models[name], self.cases[case]
        set_num_threads(self._threads if setup.threads is None else setup.threads)
        built = model.built(setup.config)
        if setup.key not in self._warm:
            few = min(WARM_UP_TOKENS, self.params.max_tokens)
            short = self.params.model_copy(update={"max_tokens": few})
            answer_case(model.target, built, prompts, short)
            self._warm.add(setup.key)
        return answer_case(model.target, built, prompts, self.params)

    def close(self) -> None:
        torch.set_num_threads(self._threads)
        for model in self.models.values():
            model.close()


def answer_case(
    model: TargetModel, built: Built, prompts: Case, params: SamplingParams
) -> CaseResult:
    """Decodes prompts together. The only use of the engine in tuning and pruning."""
    requests = [
        new_request(built.target, list(ids), params, eos_token_ids=model.eos_token_ids)
        for ids in prompts
    ]
    waiting = len(requests)
    first, rounds, committed = time.perf_counter(), 0, 0
    for round_ in Engine(built.target, built.drafter).run(requests):
        if not round_.number:
            waiting -= 1
            if not waiting:
                first = time.perf_counter()
        elif built.drafter is not None:
            rounds += 1
            committed += round_.num_committed
    seconds = time.perf_counter() - first
    answers = [request.answer_ids for request in requests]
    digest = ids_sha256([token_id for ids in answers for token_id in (*ids, -1)])
    return CaseResult(seconds, sum(len(ids) - 1 for ids in answers), rounds, committed, digest)
