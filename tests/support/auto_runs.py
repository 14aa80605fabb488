"""Auto mode on tiny targets whose time is scripted; no real clock decides anything."""

from __future__ import annotations

from collections.abc import Sequence

from d3d.engine.drafter import Draft, Drafter, Target
from d3d.engine.request import Request
from d3d.engine.sampling import LogitRows
from d3d.methods.auto.drafter import AutoDrafter
from support.doubles import Double
from support.runs import Watched

VOCAB = 97


class Clock:
    """Stands still but where it is told to go on."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Timed(Watched):
    """A target whose passes take a second and a share of one for each row more."""

    def __init__(self, target: Target, clock: Clock, row_s: float = 0.04) -> None:
        super().__init__(target)
        self._clock, self._row_s = clock, row_s

    def prefill(self, requests: Sequence[Request], num_rows: int) -> list[LogitRows | None]:
        self._take(max(map(len, requests)))
        return super().prefill(requests, num_rows)

    def verify(self, requests: Sequence[Request], drafts: Sequence[Draft]) -> list[LogitRows]:
        self._take(1 + max(len(draft.token_ids) for draft in drafts))
        return super().verify(requests, drafts)

    def _take(self, rows: int) -> None:
        self._clock.now += 1 + self._row_s * (rows - 1)


def taking(double: Double, seconds: float, clock: Clock) -> Double:
    def propose(request: Request, length: int, number: int) -> Draft:
        clock.now += seconds
        return double.make_draft(request, length, number)

    return Double(double.max_draft_length, propose)


def auto(drafters: dict[str, Drafter], draft_length: int = 5) -> AutoDrafter:
    for drafter in drafters.values():
        drafter.max_draft_length = min(drafter.max_draft_length, draft_length)
    return AutoDrafter(drafters, {})
