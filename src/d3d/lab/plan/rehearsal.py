"""Async mode without the overlap: the draft worker's work is done before the verification starts.

Blocks, hits and misses are those of async mode with the miss policy `draft_now`, and every pass is
timed alone. `overlapped` then models the overlap, as if the drafter had a device of its own."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from d3d.engine.clock import Span
from d3d.engine.drafter import NO_DRAFT, Draft, Drafter
from d3d.engine.request import Request
from d3d.engine.round import Preparation, Readiness, Round
from d3d.lab.plan.simulate import ModelledTimes, RoundWork, pipeline
from d3d.methods.async_.outcomes import Outcome
from d3d.methods.async_.packed_pass import PackedDrafter, PackedSession


@dataclass
class _Rehearsed:
    """A request's state."""

    session: PackedSession
    prepared: dict[Outcome, Draft] | None = None
    text_length: int = 0
    """Committed tokens when they were prepared."""

    def successor(self, text: list[int]) -> tuple[Draft | None, Readiness]:
        if self.prepared is None:
            return None, "unprepared"
        new = text[self.text_length :]
        draft = self.prepared.get(Outcome(len(new) - 1, new[-1]))
        return draft, "miss" if draft is None else "hit"


class RehearsedDrafter(Drafter):
    """A draft's `preparation` tells whether it had been prepared, and when this round's drafter
    passes ran: the draft after a miss, if any, then the preparation of the next drafts, if any."""

    def __init__(self, drafter: PackedDrafter, draft_length: int, outcomes: int) -> None:
        self.max_draft_length = draft_length
        self._drafter, self._outcomes = drafter, outcomes
        self._requests: dict[int, _Rehearsed] = {}

    def propose(self, requests: Sequence[Request]) -> list[Draft]:
        return [self._propose(request) for request in requests]

    def _propose(self, request: Request) -> Draft:
        text, length = request.token_ids, request.draft_room(self.max_draft_length)
        if length < 1:
            return NO_DRAFT
        if request.id not in self._requests:
            self._requests[request.id] = _Rehearsed(self._drafter.open(self._outcomes))
        state = self._requests[request.id]
        draft, readiness = state.successor(text)
        passes: list[Span] = []
        if draft is None:
            started = time.perf_counter()
            draft = state.session.draft(text, length)
            passes.append((started, time.perf_counter()))
        tokens = draft.token_ids[:length]
        state.text_length, state.prepared = len(text), None
        if draft.fault is None and (length > 1 or length == self.max_draft_length):
            started = time.perf_counter()
            outcomes = state.session.likely_outcomes(text, tokens, self._outcomes)
            state.prepared = {}
            if outcomes:
                state.prepared = state.session.prepare(text, tokens, outcomes, length)
            passes.append((started, time.perf_counter()))
        preparation = Preparation(readiness, None, tuple(passes), fitted=readiness == "hit")
        return draft._replace(token_ids=tokens, preparation=preparation)

    def end(self, request: Request) -> None:
        self._requests.pop(request.id, None)

    @property
    def num_held(self) -> int:
        return len(self._requests)


def overlapped(
    rounds: Sequence[Round], switch_s: float, rest_s: float
) -> tuple[list[Round], list[float]]:
    """Rehearsed rounds with modelled times, from 0 on, as if the drafter had a device of its own;
    and the end of each."""
    times = pipeline(map(_work, rounds), switch_s, rest_s)
    modelled = [_modelled(round_, when) for round_, when in zip(rounds, times, strict=True)]
    return modelled, [when.ended for when in times]


def _work(round_: Round) -> RoundWork:
    if round_.preparation is None:
        return RoundWork(round_.t_verify, 0.0, 0.0, None)
    hit = round_.preparation.readiness == "hit"
    spans = [end - start for start, end in round_.preparation.passes]
    fresh = 0.0 if hit else spans.pop(0)
    return RoundWork(round_.t_verify, fresh, sum(spans), hit)


def _modelled(round_: Round, when: ModelledTimes) -> Round:
    preparation = None
    if round_.preparation is not None:
        readiness = round_.preparation.readiness
        preparation = Preparation("late" if when.late and readiness == "hit" else readiness)
    return round_._replace(
        t_draft=when.verify_from - when.started, started=when.started, preparation=preparation
    )
