"""One round: draft, verify, accept, commit. Start reading here.

Plain decoding is the same round with an empty draft, so every mode's output goes through the same
few lines."""

from __future__ import annotations

import time
from collections.abc import Sequence as ListLike
from typing import NamedTuple

from d3d.core.protocols import AcceptanceRule, TargetSession, TimedSession
from d3d.core.types import RoundStats
from d3d.decoding.drafts import NO_DRAFT, Drafts
from d3d.decoding.request import Request
from d3d.decoding.stopping import Scan


class RoundResult(NamedTuple):
    """What a round did for one request."""

    scan: Scan
    stats: RoundStats
    fault: str | None


def run_round(
    target: TargetSession,
    drafts: Drafts | None,
    requests: ListLike[Request],
    accept: AcceptanceRule,
) -> list[RoundResult]:
    """Advance every request by one round; none of them may be finished.

    Before and after, the target's cache holds each sequence's committed tokens minus the anchor.
    """
    started = time.perf_counter()
    blocks = [NO_DRAFT] * len(requests) if drafts is None else drafts.blocks(requests)
    drafted = time.perf_counter()
    logits = target.forward(
        [
            [request.sequence.anchor, *block.token_ids]
            for request, block in zip(requests, blocks, strict=True)
        ]
    )
    scans = []
    for request, block, rows in zip(requests, blocks, logits, strict=True):
        scan = request.scanner.scan(
            accept(rows, block.token_ids, request.sequence, request.eos_token_ids)
        )
        request.sequence.commit(scan.verdict.token_ids)
        request.sequence.finish_reason = scan.finish_reason
        scans.append(scan)
    target.crop([len(request.sequence) - 1 for request in requests])
    t_draft, t_verify = drafted - started, time.perf_counter() - drafted
    device_span = target.pass_span() if isinstance(target, TimedSession) else None
    stats = [
        RoundStats(
            len(block.token_ids),
            scan.verdict.num_accepted,
            len(scan.verdict.token_ids),
            t_draft,
            t_verify,
            started,
            block.preparation,
            device_span,
            block.looked_up,
            block.num_slots,
        )
        for scan, block in zip(scans, blocks, strict=True)
    ]
    if drafts is not None:
        drafts.observe(stats)
    return [
        RoundResult(scan, one, block.fault)
        for scan, one, block in zip(scans, stats, blocks, strict=True)
    ]
