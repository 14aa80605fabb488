"""The decoding loop: prefill, then rounds until every request has ended. One loop for every mode."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

from d3d.acceptance.sample_match import sample_match
from d3d.core.protocols import Drafter, TargetEngine, TargetSession
from d3d.core.types import FinishReason, RoundStats, Verdict
from d3d.decoding.drafts import Drafts, Limits, without_holes
from d3d.decoding.request import Request
from d3d.decoding.round import run_round
from d3d.decoding.stopping import Scan


@dataclass(frozen=True)
class Event:
    """Tokens that one request has just been given."""

    index: int
    """Which request of the list."""
    verdict: Verdict
    text: str
    finish_reason: FinishReason | None
    stats: RoundStats | None
    """None for the first token, which the prefill gives and no round."""
    fault: str | None
    """Why this request drafts no more from this round on, if so."""


def decode(target: TargetEngine, drafter: Drafter | None, requests: list[Request], draft_length: int = 0) -> Iterator[Event]:
    """Decode all requests together, each as if it were alone. Plain where `drafter` is None or `draft_length` 0.

    Requests are verified in one batch and drafted in one pass; those that have ended leave between rounds. A request whose
    block was faulty goes on plainly, and so do all when the drafter fails. Raises ValueError for a negative `draft_length`.
    """
    if draft_length < 0:
        raise ValueError(f"draft_length must not be negative, got {draft_length}")
    if not requests:
        return
    width = 0 if drafter is None else min(draft_length, drafter.block_size)
    capacity = max(request.sequence.prompt_length + request.scanner.limit for request in requests) + width + 1
    session = target.open(len(requests), capacity)
    limits = Limits(width, capacity, target.vocab_size)
    drafts = Drafts(drafter, session, requests, limits) if drafter is not None and width else None
    try:
        yield from _decode(session, drafts, requests)
    finally:
        if drafts is not None:
            drafts.close()


def _decode(session: TargetSession, drafts: Drafts | None, requests: list[Request]) -> Iterator[Event]:
    started = time.perf_counter()
    logits = session.forward([request.sequence.token_ids for request in requests], last_only=True)
    verdicts = [sample_match(row, (), each.sequence, each.eos_token_ids) for row, each in zip(logits, requests, strict=True)]
    if drafts is not None:
        drafts.prefilled(time.perf_counter() - started)
    for index, (request, verdict) in enumerate(zip(requests, verdicts, strict=True)):
        scan = request.scanner.scan(verdict)
        request.sequence.commit(scan.verdict.token_ids)
        request.sequence.finish_reason = scan.finish_reason
        yield _event(index, scan, None, None)
    active = list(range(len(requests)))
    while True:
        going = without_holes([not requests[index].finished for index in active])
        if not going:
            return
        if len(going) < len(active):
            session.keep(going)
            active = [active[row] for row in going]
        results = run_round(session, drafts, [requests[index] for index in active], sample_match)
        for index, result in zip(active, results, strict=True):
            yield _event(index, result.scan, result.stats, result.fault)


def _event(index: int, scan: Scan, stats: RoundStats | None, fault: str | None) -> Event:
    return Event(index, scan.verdict, scan.text, scan.finish_reason, stats, fault)
