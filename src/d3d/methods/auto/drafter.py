"""Auto mode: each round goes through the method that is fastest so far.

It delegates to one of several drafters and changes between rounds only; plain rounds draft nothing.
Every draft is verified like any other, so the answer is the same."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack, suppress

from d3d.engine.drafter import NO_DRAFT, Draft, Drafter
from d3d.engine.request import Request
from d3d.engine.round import Round
from d3d.errors import D3DError
from d3d.methods.auto.chooser import PLAIN, AutoReport, Chooser, ModeTimes, RoundCost


class AutoDrafter(Drafter):
    """Chooses one mode per round for all running requests. Measurements are kept by the number of
    requests that run together."""

    def __init__(
        self,
        candidates: Mapping[str, Drafter],
        left_out: Mapping[str, str],
        *,
        required: Collection[str] = (),
    ) -> None:
        """candidates: drafters by mode, in the order of trial; left_out: reasons why other modes
        are not among them; required: candidates that must be able to start."""
        self.candidates = dict(candidates)
        self.max_draft_length = max(
            (drafter.max_draft_length for drafter in candidates.values()), default=0
        )
        self._left_out, self._required = dict(left_out), frozenset(required)
        self._unready: dict[str, str] = {}
        """Candidates that could not start, and why."""
        self._times: dict[int, ModeTimes] = {}
        self._prefill = RoundCost(0.0, 1.0)
        self._members: dict[int, Request] = {}
        self._mode = PLAIN
        self.chooser = self._new_chooser(ModeTimes())

    def _new_chooser(self, times: ModeTimes) -> Chooser:
        ready = tuple(mode for mode in self.candidates if mode not in self._unready)
        return Chooser(ready, times, self._left_out | self._unready, self._prefill)

    def _times_of(self, num_requests: int) -> ModeTimes:
        return self._times.setdefault(num_requests, ModeTimes())

    def ready(self) -> None:
        """Start every candidate. One that can't start is left out until the next call, or raises
        its WorkerFailed if it is required."""
        self._unready = {}
        for mode, drafter in self.candidates.items():
            try:
                drafter.ready()
            except D3DError as error:
                if mode in self._required:
                    raise
                self._unready[mode] = str(error)

    def report(self) -> AutoReport:
        """Describe the rounds since it last had no request."""
        return self.chooser.report

    def prefilled(self, seconds: float, num_tokens: int) -> None:
        self._prefill = RoundCost(seconds, num_tokens)
        if self._members:
            self.chooser.prefill = self._prefill
        else:  # an answer of one token has a report too
            self.chooser = self._new_chooser(ModeTimes())

    def propose(self, requests: Sequence[Request]) -> list[Draft]:
        times = self._times_of(len(requests))
        if not self._members:
            self._mode = PLAIN
            self.chooser = self._new_chooser(times)
        self._members |= {request.id: request for request in requests}
        self.chooser.times = times
        remaining = max(
            request.params.max_tokens - request.num_answer_tokens for request in requests
        )
        missing = {
            mode: sum(self.candidates[mode].num_missing(request) for request in requests)
            for mode in self.chooser.candidates
        }
        mode = self.chooser.choose(remaining, missing)
        if mode != self._mode:
            self._turn_to(mode)
        if mode == PLAIN:
            return [NO_DRAFT for _ in requests]
        try:
            drafts = self.candidates[mode].propose(requests)
        except Exception as error:  # a drafter's failure must not end the other modes
            return self._drop(
                mode, f"the drafter failed: {type(error).__name__}: {error}", requests
            )
        fault = next((draft.fault for draft in drafts if draft.fault is not None), None)
        return drafts if fault is None else self._drop(mode, fault, requests)

    def _turn_to(self, mode: str) -> None:
        if self._mode in self.candidates:
            for request in self._members.values():
                with suppress(Exception):  # this must not affect the next mode
                    self.candidates[self._mode].suspend(request)
        self._mode = mode

    def _drop(self, mode: str, fault: str, requests: Sequence[Request]) -> list[Draft]:
        """Leave a mode out that has failed. This round goes on without a draft."""
        self.chooser.drop(mode, fault)
        self._turn_to(PLAIN)
        return [NO_DRAFT for _ in requests]

    def observe(self, rounds: Sequence[Round]) -> None:
        tokens = sum(round_.num_committed for round_ in rounds) / len(rounds)
        self.chooser.observe(rounds[0].t_draft + rounds[0].t_verify, tokens)
        if self._mode in self.candidates:
            self.candidates[self._mode].observe(rounds)

    def suspend(self, request: Request) -> None:
        self._members.pop(request.id, None)
        for drafter in self.candidates.values():
            with suppress(Exception):
                drafter.suspend(request)

    def end(self, request: Request) -> None:
        self._members.pop(request.id, None)
        for drafter in self.candidates.values():
            with suppress(Exception):  # the others must forget it too
                drafter.end(request)

    def close(self) -> None:
        with ExitStack() as stack:
            for drafter in self.candidates.values():
                stack.callback(drafter.close)

    @property
    def num_held(self) -> int:
        """Requests that it holds state for, and those that its candidates hold state for."""
        return len(self._members) + sum(each.num_held for each in self.candidates.values())
