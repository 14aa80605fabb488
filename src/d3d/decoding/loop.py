"""The decoding loop: prefill, then rounds until every request has ended. One loop for every
mode."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from torch import Tensor

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


def decode(
    target: TargetEngine,
    drafter: Drafter | None,
    requests: list[Request],
    draft_length: int = 0,
    *,
    max_batch: int | None = None,
) -> Iterator[Event]:
    """Decode requests together, each as if it were alone: all of them, or `max_batch` at a time.
    Plain where `drafter` is None or `draft_length` 0.

    Requests are verified in one batch and drafted in one pass; those that have ended leave between
    rounds, and those that wait take their places. A request whose block was faulty goes on plainly,
    and so do all when the drafter fails. Raises ValueError for a negative `draft_length`, and for a
    `max_batch` below 1."""
    if draft_length < 0:
        raise ValueError(f"draft_length must not be negative, got {draft_length}")
    if max_batch is not None and max_batch < 1:
        raise ValueError(f"max_batch must be 1 or more, got {max_batch}")
    if not requests:
        return
    width = 0 if drafter is None else min(draft_length, drafter.block_size)
    capacity = (
        max(request.sequence.prompt_length + request.scanner.limit for request in requests)
        + width
        + 1
    )
    batch = min(max_batch or len(requests), len(requests))
    session = target.open(batch, capacity)
    limits = Limits(width, capacity, target.vocab_size, batch)
    drafts = Drafts(drafter, session, limits) if drafter is not None and width else None
    try:
        yield from _decode(session, drafts, requests, batch)
    finally:
        if drafts is not None:
            drafts.close()


def _decode(
    session: TargetSession, drafts: Drafts | None, requests: list[Request], batch: int
) -> Iterator[Event]:
    active = list(range(batch))
    waiting = iter(range(batch, len(requests)))
    started = time.perf_counter()
    logits = session.forward(
        [requests[index].sequence.token_ids for index in active], last_only=True
    )
    verdicts = _first_verdicts(requests, active, logits)
    if drafts is not None:
        drafts.prefilled(time.perf_counter() - started)
    yield from _first_tokens(requests, active, verdicts)
    while True:
        going = without_holes([not requests[index].finished for index in active])
        joining = list(islice(waiting, batch - len(going)))
        if not going and not joining:
            return
        if len(going) < len(active):
            session.keep(going)
            active = [active[row] for row in going]
        if joining:
            session.join(len(joining))
            prompts = [requests[index].sequence.token_ids for index in joining]
            logits = session.forward([*([] for _ in active), *prompts], last_only=True)[
                len(active) :
            ]
            active += joining
            yield from _first_tokens(requests, joining, _first_verdicts(requests, joining, logits))
            continue  # one token may have been all
        results = run_round(session, drafts, [requests[index] for index in active], sample_match)
        for index, result in zip(active, results, strict=True):
            yield _event(index, result.scan, result.stats, result.fault)


def _first_verdicts(
    requests: list[Request], indices: list[int], logits: list[Tensor]
) -> list[Verdict]:
    """What the prefill gives."""
    chosen = [requests[index] for index in indices]
    return [
        sample_match(row, (), each.sequence, each.eos_token_ids)
        for row, each in zip(logits, chosen, strict=True)
    ]


def _first_tokens(
    requests: list[Request], indices: list[int], verdicts: list[Verdict]
) -> Iterator[Event]:
    for index, verdict in zip(indices, verdicts, strict=True):
        request = requests[index]
        scan = request.scanner.scan(verdict)
        request.sequence.commit(scan.verdict.token_ids)
        request.sequence.finish_reason = scan.finish_reason
        yield _event(index, scan, None, None)


def _event(index: int, scan: Scan, stats: RoundStats | None, fault: str | None) -> Event:
    return Event(index, scan.verdict, scan.text, scan.finish_reason, stats, fault)
