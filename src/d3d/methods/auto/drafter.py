"""Auto mode: each round goes through the method that is fastest so far.

It delegates to one of several drafters and changes between rounds only; plain rounds draft nothing.
What any of them drafts is verified like any other draft, so the answer is the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from d3d.engine.drafter import NO_DRAFT, Draft, Drafter
from d3d.engine.request import Request
from d3d.engine.round import Round
from d3d.methods.auto.chooser import PLAIN, AutoReport, Chooser, ModeTimes, RoundCost


class AutoDrafter(Drafter):
    """Chooses for all running requests together. What it has measured is kept by the number of
    requests that run."""

    def __init__(self, candidates: Mapping[str, Drafter], left_out: Mapping[str, str]) -> None:
        """candidates: drafters by method, in the order in which they are tried; left_out: why other
        methods are not among them."""
        self.candidates = dict(candidates)
        self.max_draft_length = max(
            (drafter.max_draft_length for drafter in candidates.values()), default=0
        )
        self._left_out = dict(left_out)
        self._times: dict[int, ModeTimes] = {}
        self._prefill = RoundCost(0.0, 1.0)
        self._members: dict[int, Request] = {}
        self._mode = PLAIN
        self.chooser = self._new_chooser(1)

    def _new_chooser(self, num_requests: int) -> Chooser:
        times = self._times.setdefault(num_requests, ModeTimes())
        return Chooser(tuple(self.candidates), times, dict(self._left_out), self._prefill)

    def report(self) -> AutoReport:
        """What it has come to since it last had no request."""
        return self.chooser.choice

    def prefilled(self, seconds: float, num_tokens: int) -> None:
        self._prefill = self.chooser.prefill = RoundCost(seconds, num_tokens)

    def propose(self, requests: Sequence[Request]) -> list[Draft]:
        if not self._members:
            self._mode = PLAIN
            self.chooser = self._new_chooser(len(requests))
        self._members |= {request.id: request for request in requests}
        self.chooser.times = self._times.setdefault(len(requests), ModeTimes())
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
        except Exception as error:  # whatever a drafter dies of, the other methods go on
            return self._drop(
                mode, f"the drafter failed: {type(error).__name__}: {error}", requests
            )
        fault = next((draft.fault for draft in drafts if draft.fault is not None), None)
        return drafts if fault is None else self._drop(mode, fault, requests)

    def _turn_to(self, mode: str) -> None:
        if self._mode in self.candidates:
            for request in self._members.values():
                self.candidates[self._mode].suspend(request)
        self._mode = mode

    def _drop(self, mode: str, fault: str, requests: Sequence[Request]) -> list[Draft]:
        """The method under way has failed: this round goes on without a draft, the next ones with
        what is left."""
        self.chooser.drop(mode, fault)
        self._turn_to(PLAIN)
        return [NO_DRAFT for _ in requests]

    def observe(self, rounds: Sequence[Round]) -> None:
        tokens = sum(one.num_committed for one in rounds) / len(rounds)
        self.chooser.observe(rounds[0].t_draft + rounds[0].t_verify, tokens)

    def end(self, request: Request) -> None:
        self._members.pop(request.id, None)
        for drafter in self.candidates.values():
            drafter.end(request)

    def close(self) -> None:
        for drafter in self.candidates.values():
            drafter.close()

    @property
    def num_held(self) -> int:
        return len(self._members) + sum(one.num_held for one in self.candidates.values())
