"""Async mode without the overlap: the draft worker's work is done before the verification starts.

Blocks, hits and misses are those of async mode with the miss policy `draft_now`, and every pass is
timed alone. `overlapped` then models the overlap, as if the drafter had a device of its own."""

from __future__ import annotations

import time
from collections.abc import Sequence as ListLike
from dataclasses import dataclass

from d3d.core.protocols import PreparingSession
from d3d.core.sequence import Sequence
from d3d.core.types import DraftBlock, Outcome, Preparation, Readiness, RoundStats
from d3d.drafting.packed_pass import PackedDrafter
from d3d.lab.plan.simulate import RoundTimes, RoundWork, pipeline

Span = tuple[float, float]


@dataclass(frozen=True)
class RehearsedDrafter:
    """Drafts for one sequence at a time."""

    drafter: PackedDrafter
    draft_length: int
    outcomes: int

    @property
    def block_size(self) -> int:
        return self.drafter.block_size

    def open(self, num_sequences: int, capacity: int) -> RehearsedSession:
        if num_sequences != 1:
            raise ValueError(f"a rehearsal is of one sequence, not of {num_sequences}")
        return RehearsedSession(self, self.drafter.open(capacity, self.outcomes))


class RehearsedSession:
    """A block's `preparation` tells whether it had been prepared, and when this round's drafter
    passes ran: the draft after a miss, if any, then the preparation of the next blocks, if any."""

    def __init__(self, drafter: RehearsedDrafter, session: PreparingSession) -> None:
        self._drafter = drafter
        self._session = session
        self._prepared: dict[Outcome, DraftBlock] | None = None
        self._text_length = 0

    def keep(self, rows: list[int]) -> None:
        """There is one row, and it stays."""

    def join(self, count: int) -> None:
        raise ValueError(f"{count} sequences can't join: a rehearsal is of one")

    def draft(self, sequences: ListLike[Sequence], lengths: ListLike[int]) -> list[DraftBlock]:
        (sequence,), (length,) = sequences, lengths
        if length < 1:
            return [DraftBlock()]
        text = sequence.token_ids
        block, readiness = self._successor(text)
        passes: list[Span] = []
        if block is None:
            started = time.perf_counter()
            block = self._session.draft(text, length)
            passes.append((started, time.perf_counter()))
        tokens = block.token_ids[:length]
        self._text_length, self._prepared = len(text), None
        answer_goes_on = length > 1 or length == self._drafter.draft_length
        if block.fault is None and answer_goes_on:
            started = time.perf_counter()
            outcomes = self._session.likely_outcomes(text, tokens, self._drafter.outcomes)
            self._prepared = (
                self._session.prepare(text, tokens, outcomes, length) if outcomes else {}
            )
            passes.append((started, time.perf_counter()))
        preparation = Preparation(readiness, None, tuple(passes), fitted=readiness == "hit")
        return [block._replace(token_ids=tokens, preparation=preparation)]

    def _successor(self, text: list[int]) -> tuple[DraftBlock | None, Readiness]:
        if self._prepared is None:
            return None, "unprepared"
        new = text[self._text_length :]
        block = self._prepared.get(Outcome(len(new) - 1, new[-1]))
        return block, "miss" if block is None else "hit"


def overlapped(
    rounds: ListLike[RoundStats], switch_s: float, rest_s: float
) -> tuple[list[RoundStats], list[float]]:
    """Rehearsed rounds with modelled times, from 0 on, as if the drafter had a device of its own;
    and the end of each."""
    times = pipeline(map(_work, rounds), switch_s, rest_s)
    modelled = [_modelled(round_, when) for round_, when in zip(rounds, times, strict=True)]
    return modelled, [when.ended for when in times]


def _work(round_: RoundStats) -> RoundWork:
    if round_.preparation is None:
        return RoundWork(round_.t_verify, 0.0, 0.0, None)
    hit = round_.preparation.readiness == "hit"
    spans = [end - start for start, end in round_.preparation.passes]
    fresh = 0.0 if hit else spans.pop(0)
    return RoundWork(round_.t_verify, fresh, sum(spans), hit)


def _modelled(round_: RoundStats, when: RoundTimes) -> RoundStats:
    preparation = None
    if round_.preparation is not None:
        readiness = round_.preparation.readiness
        preparation = Preparation("late" if when.late and readiness == "hit" else readiness)
    return round_._replace(
        t_draft=when.verify_from - when.started, started=when.started, preparation=preparation
    )
