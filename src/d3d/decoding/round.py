"""One round: draft, verify, accept, commit. Start reading here.

Plain decoding is the same round with an empty draft, so every mode's output goes through the same few lines.
"""

from __future__ import annotations

import time
from collections.abc import Sequence as ListLike
from typing import NamedTuple

from d3d.core.protocols import AcceptanceRule, DraftSession, TargetSession
from d3d.core.types import DraftBlock, RoundStats
from d3d.decoding.request import Request
from d3d.decoding.stopping import Scan


class RoundResult(NamedTuple):
    """What a round did for one request."""

    scan: Scan
    stats: RoundStats
    fault: str | None


def run_round(
    target: TargetSession, drafter: DraftSession | None, requests: ListLike[Request], draft_length: int, accept: AcceptanceRule, vocab_size: int
) -> list[RoundResult]:
    """Advance every request by one round; none of them may be finished.

    Before and after, the target's cache holds each sequence's committed tokens minus the anchor.
    """
    started = time.perf_counter()
    blocks = _draft(drafter, requests, draft_length, vocab_size)
    drafted = time.perf_counter()
    logits = target.forward([[request.sequence.anchor, *block.token_ids] for request, block in zip(requests, blocks, strict=True)])
    scans = []
    for request, block, rows in zip(requests, blocks, logits, strict=True):
        scan = request.scanner.scan(accept(rows, block.token_ids, request.sequence, request.eos_token_ids))
        request.sequence.commit(scan.verdict.token_ids)
        request.sequence.finish_reason = scan.finish_reason
        scans.append(scan)
    target.crop([len(request.sequence) - 1 for request in requests])
    t_draft, t_verify = drafted - started, time.perf_counter() - drafted
    return [
        RoundResult(
            scan,
            RoundStats(len(block.token_ids), scan.verdict.num_accepted, len(scan.verdict.token_ids), t_draft, t_verify),
            block.fault,
        )
        for scan, block in zip(scans, blocks, strict=True)
    ]


def _draft(drafter: DraftSession | None, requests: ListLike[Request], draft_length: int, vocab_size: int) -> list[DraftBlock]:
    if drafter is None:
        return [DraftBlock() for _ in requests]
    lengths = [min(draft_length, request.scanner.remaining - 1) for request in requests]
    if max(lengths) < 1:
        return [DraftBlock() for _ in requests]
    try:
        blocks = drafter.draft([request.sequence for request in requests], lengths)
    except Exception as error:  # whatever a drafter dies of, the answer goes on
        return [DraftBlock(fault=f"the drafter failed: {type(error).__name__}: {error}") for _ in requests]
    return [_checked(block, length, vocab_size) for block, length in zip(blocks, lengths, strict=True)]


def _checked(block: DraftBlock, length: int, vocab_size: int) -> DraftBlock:
    """Only ids that the target knows may reach it, and no more than were asked for."""
    if any(not 0 <= token_id < vocab_size for token_id in block.token_ids):
        return DraftBlock(fault=f"the drafter proposed an id outside of the target's vocabulary of {vocab_size}")
    return DraftBlock(block.token_ids[: max(0, length)], block.fault)
