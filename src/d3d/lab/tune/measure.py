"""One measurement: a setup answers a case, alone or several prompts together."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch

from d3d.api import Model
from d3d.core.types import SamplingParams
from d3d.decoding.loop import decode
from d3d.decoding.modes import Decoding
from d3d.engine.request import new_request
from d3d.lab.tune.setups import Setup
from d3d.lab.tune.traffic import ids_sha256

WARM_UP_TOKENS = 8
"""The first passes of a setup are slower, and not measured."""

Case = Sequence[Sequence[int]]
"""Prompts, as token ids, that are answered together."""


class Measured(NamedTuple):
    """What a setup did with a case."""

    seconds: float
    """After the first tokens."""
    tokens: int
    """After the first of each answer."""
    rounds: int = 0
    committed: int = 0
    answers_sha256: str = ""
    """Of all ids."""

    @property
    def ms_per_token(self) -> float:
        """Of all answers together: what concurrency is to lower."""
        return 1000 * self.seconds / self.tokens if self.tokens else 0.0


class Measurer(Protocol):
    """Whatever answers cases."""

    def __call__(self, setup: Setup, case: int) -> Measured: ...


@dataclass
class LoopMeasurer:
    """Runs the decoding loop. Changes torch's number of threads; `close` puts it back, and ends
    what async mode has started."""

    models: Mapping[str, Model]
    """By the drafter's name; all with the same target."""
    cases: Sequence[Case]
    params: SamplingParams
    _warm: set[str] = field(default_factory=set)
    _threads: int = field(default_factory=torch.get_num_threads)

    def __call__(self, setup: Setup, case: int) -> Measured:
        """Raises InvalidRequest for a setup that can't be, WorkerFailed where async mode does not
        come up."""
        model = (
            next(iter(self.models.values()))
            if setup.drafter is None
            else self.models[setup.drafter]
        )
        torch.set_num_threads(self._threads if setup.threads is None else setup.threads)
        chosen = model.decoding(setup.mode, setup.options)
        prompts = self.cases[case]
        if setup.key not in self._warm:
            self._answer(
                model,
                chosen,
                prompts,
                self.params.model_copy(
                    update={"max_tokens": min(WARM_UP_TOKENS, self.params.max_tokens)}
                ),
            )
            self._warm.add(setup.key)
        return self._answer(model, chosen, prompts, self.params)

    def _answer(
        self, model: Model, chosen: Decoding, prompts: Case, params: SamplingParams
    ) -> Measured:
        requests = [
            new_request(
                model.engine,
                list(ids),
                params,
                eos_token_ids=model.target.eos_token_ids,
                device=model.target.device,
            )
            for ids in prompts
        ]
        waiting = len(requests)
        first, rounds, committed = time.perf_counter(), 0, 0
        for event in decode(chosen.target, chosen.drafter, requests, chosen.draft_length):
            if event.stats is None:
                waiting -= 1
                if not waiting:
                    first = time.perf_counter()
            elif chosen.drafter is not None:
                rounds += 1
                committed += event.stats.num_committed
        seconds = time.perf_counter() - first
        answers = [request.sequence.answer_ids for request in requests]
        tokens = sum(len(ids) - 1 for ids in answers)
        return Measured(
            seconds,
            tokens,
            rounds,
            committed,
            ids_sha256([token_id for ids in answers for token_id in (*ids, -1)]),
        )

    def close(self) -> None:
        torch.set_num_threads(self._threads)
        for model in self.models.values():
            model.close()
