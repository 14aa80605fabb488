"""The decoding loop: prefill, then rounds until every request has ended. One loop for every mode."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from d3d.acceptance.sample_match import sample_match
from d3d.core.protocols import Drafter, DraftSession, TargetEngine
from d3d.core.types import FinishReason, RoundStats, Verdict
from d3d.decoding.request import Request
from d3d.decoding.round import run_round
from d3d.decoding.stopping import Scan


class Event(NamedTuple):
    """Tokens that one request has just been given."""

    index: int
    """Which request of the list."""
    verdict: Verdict
    text: str
    finish_reason: FinishReason | None
    stats: RoundStats | None
    """None for the first token, which the prefill gives and no round."""
    fault: str | None
    """Why drafting ended with this round, if it did."""


def decode(target: TargetEngine, drafter: Drafter | None, requests: list[Request], draft_length: int = 0) -> Iterator[Event]:
    """Decode all requests together, each as if it were alone. Plain where `drafter` is None.

    Requests are verified in one batch and drafted in one pass; those that have ended leave between rounds. A drafter that
    fails is not asked again: decoding goes on plainly.
    """
    if not requests:
        return
    width = 0 if drafter is None else min(draft_length, drafter.block_size)
    capacity = max(request.sequence.prompt_length + request.scanner.limit for request in requests) + width + 1
    session = target.open(len(requests), capacity)
    drafts: DraftSession | None = drafter.open(len(requests), capacity) if drafter is not None and width else None
    logits = session.forward([request.sequence.token_ids for request in requests], last_only=True)
    for index, (request, row) in enumerate(zip(requests, logits, strict=True)):
        scan = request.scanner.scan(sample_match(row, (), request.sequence, request.eos_token_ids))
        request.sequence.commit(scan.verdict.token_ids)
        request.sequence.finish_reason = scan.finish_reason
        yield _event(index, scan, None, None)
    active = list(range(len(requests)))
    while True:
        going = _without_holes([not requests[index].finished for index in active])
        if not going:
            return
        if len(going) < len(active):
            session.keep(going)
            if drafts is not None:
                drafts.keep(going)
            active = [active[row] for row in going]
        results = run_round(session, drafts, [requests[index] for index in active], width, sample_match, target.vocab_size)
        if any(result.fault for result in results):
            drafts = None
        for index, result in zip(active, results, strict=True):
            yield _event(index, result.scan, result.stats, result.fault)


def _without_holes(alive: list[bool]) -> list[int]:
    """The living rows, in an order that moves as few as possible: the last ones fill the holes."""
    living = [row for row, lives in enumerate(alive) if lives]
    count = len(living)
    spare = [row for row in living if row >= count]
    return [row if alive[row] else spare.pop() for row in range(count)]


def _event(index: int, scan: Scan, stats: RoundStats | None, fault: str | None) -> Event:
    return Event(index, scan.verdict, scan.text, scan.finish_reason, stats, fault)
