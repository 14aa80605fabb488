"""Async mode one thing after the other: what the draft worker would do while the target verifies is
done before it.

Blocks, hits and misses are those of async mode with the miss policy `draft_now`, and every pass is
timed alone. Only the overlap is missing; `d3d.lab.plan.simulate` adds it, as if the drafter had a
device of its own."""

from __future__ import annotations

import time
from collections.abc import Sequence as ListLike
from dataclasses import dataclass

from d3d.core.sequence import Sequence
from d3d.core.types import DraftBlock, Outcome, RoundStats
from d3d.engine.round import Preparation, Readiness
from d3d.lab.plan.simulate import Done, Work, pipeline
from d3d.methods.async_.packed_pass import PackedDrafter
from d3d.methods.async_.preparer import PreparingSession

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
            raise ValueError(f"rounds are rehearsed for one sequence, not for {num_sequences}")
        return RehearsedSession(self, self.drafter.open(capacity, self.outcomes))


class RehearsedSession:
    """A block's `preparation` tells whether it was prepared before, and when this round's drafter
    passes ran: the draft that a miss asked for, if there was one, then the preparation of the next
    blocks, if there was one."""

    def __init__(self, drafter: RehearsedDrafter, session: PreparingSession) -> None:
        self._drafter = drafter
        self._session = session
        self._prepared: dict[Outcome, DraftBlock] | None = None
        self._text_length = 0
        self._draft: tuple[int, ...] = ()

    def keep(self, rows: list[int]) -> None:
        """There is one row, and it stays."""

    def join(self, count: int) -> None:
        raise ValueError(f"{count} sequences can't join: a rehearsal is of one")

    def draft(self, sequences: ListLike[Sequence], lengths: ListLike[int]) -> list[DraftBlock]:
        (sequence,), (length,) = sequences, lengths
        if length < 1:
            return [DraftBlock()]
        text = sequence.token_ids
        block, readiness = self._found(text)
        passes: list[Span] = []
        if block is None:
            started = time.perf_counter()
            block = self._session.draft(text, length)
            passes.append((started, time.perf_counter()))
        tokens = block.token_ids[:length]
        self._text_length, self._draft, self._prepared = len(text), tokens, None
        if block.fault is None and (
            length > 1 or length == self._drafter.draft_length
        ):  # else the answer ends before another draft
            started = time.perf_counter()
            outcomes = self._session.likely_outcomes(text, tokens, self._drafter.outcomes)
            self._prepared = (
                self._session.prepare(text, tokens, outcomes, length) if outcomes else {}
            )
            passes.append((started, time.perf_counter()))
        return [
            block._replace(
                token_ids=tokens,
                preparation=Preparation(readiness, None, tuple(passes), fitted=readiness == "hit"),
            )
        ]

    def _found(self, text: list[int]) -> tuple[DraftBlock | None, Readiness]:
        if self._prepared is None:
            return None, "unprepared"
        new = text[self._text_length :]
        block = self._prepared.get(Outcome(len(new) - 1, new[-1]))
        return block, "miss" if block is None else "hit"


def overlapped(
    rounds: ListLike[RoundStats], switch_s: float, rest_s: float
) -> tuple[list[RoundStats], list[float]]:
    """Rehearsed rounds as they would be with the drafter on a device of its own: their times,
    modelled, from 0 on; and when each ends."""
    done = pipeline([_work(one) for one in rounds], switch_s, rest_s)
    return [_modelled(one, when) for one, when in zip(rounds, done, strict=True)], [
        when.ended for when in done
    ]


def _work(one: RoundStats) -> Work:
    if one.preparation is None:
        return Work(one.t_verify, 0.0, 0.0, None)
    hit = one.preparation.readiness == "hit"
    spans = [end - start for start, end in one.preparation.passes]
    fresh = 0.0 if hit else spans.pop(0)
    return Work(one.t_verify, fresh, sum(spans), hit)


def _modelled(one: RoundStats, when: Done) -> RoundStats:
    before = one.preparation
    preparation = (
        None
        if before is None
        else Preparation("late" if when.late and before.readiness == "hit" else before.readiness)
    )
    return one._replace(
        t_draft=when.verify_from - when.started, started=when.started, preparation=preparation
    )
