"""The draft length that pays: least time per token, from passes measured on this machine and the
drafter's known acceptance."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

import torch

from d3d.engine.drafter import Draft
from d3d.engine.request import Request
from d3d.methods.base import DEFAULT_DRAFT_LENGTH

if TYPE_CHECKING:
    from d3d.methods.base import Parts
    from d3d.model.drafter import DrafterModel
    from d3d.target.native import NativeTarget

PRIOR_KEPT = 0.65
"""Acceptance probability of a token, given that those before it are kept, of a drafter whose
checkpoint was not evaluated."""
CONTEXT = 128
REPEATS = 9
SIZES = (4, 16)
"""Rows of the two verifications from which the price of a row is measured."""


def paying_length(parts: Parts, *, overlapped: bool = False) -> int:
    """Draft length of least time per token. overlapped: drafting costs only what exceeds the
    verification. Measures passes on the first call for this machine, target and drafter;
    DEFAULT_DRAFT_LENGTH if another engine runs the target."""
    from d3d.methods.costs import machine_costs
    from d3d.target.native import NativeTarget

    target, drafter = parts.target, parts.drafter
    assert drafter is not None
    longest = drafter.config.block_size
    if not isinstance(target, NativeTarget):
        return min(DEFAULT_DRAFT_LENGTH, longest)
    costs = machine_costs(parts)

    def best() -> int:
        row, draft = prices(target, drafter)
        costs.measured("verified_row_price", lambda: row)
        costs.measured("draft_price", lambda: draft)
        return best_length(survival(parts), row, draft, overlapped=overlapped)

    name = "async_draft_length" if overlapped else "serial_draft_length"
    return int(costs.measured(name, best))


def best_length(
    kept: Sequence[float], row: float, draft: float, *, overlapped: bool = False
) -> int:
    """kept[j]: probability that at least j + 1 tokens are kept; row: price of a further row of a
    verification, and draft: of a drafting pass, in plain passes."""

    def seconds_a_token(length: int) -> float:
        verify = 1.0 + row * length
        seconds = max(draft, verify) if overlapped else draft + verify
        return seconds / (1.0 + sum(kept[:length]))

    return min(range(1, len(kept) + 1), key=seconds_a_token)


def survival(parts: Parts) -> list[float]:
    """Probabilities that at least the first 1, 2, ... drafted tokens are kept, up to the block
    size: as evaluated at training, and by PRIOR_KEPT for positions that were not."""
    from d3d.hub.checkpoint import read_provenance

    assert parts.drafter is not None
    size = parts.drafter.config.block_size
    known = {} if parts.drafter_path is None else read_provenance(parts.drafter_path)
    measured = known.get("measured")
    shares = measured.get("acceptance_at") if isinstance(measured, dict) else None
    kept = shares if isinstance(shares, list) else []
    kept = [share for share in kept if isinstance(share, int | float) and 0 <= share <= 1]
    further = accumulate([PRIOR_KEPT] * size, lambda a, b: a * b, initial=kept[-1] if kept else 1.0)
    return [*kept, *list(further)[1:]][:size]


def prices(target: NativeTarget, drafter: DrafterModel) -> tuple[float, float]:
    """Price of a further row of a verification, and of a drafting pass, in plain passes."""
    from d3d.methods.serial.drafter import BlockDrafter
    from d3d.target.native import NativeTarget

    alone = NativeTarget(target.model)
    context = max(1, min(CONTEXT, alone.max_length - SIZES[-1] - 1))
    request = Request([token_id % alone.vocab_size for token_id in range(context)])
    alone.prefill([request], context)
    request.token_ids.append(request.token_ids[0])

    def verify(rows: int) -> Callable[[], None]:
        def run() -> None:
            alone.verify([request], [Draft((request.token_ids[0],) * (rows - 1))])
            alone.rewind([request])

        return run

    blocks = BlockDrafter(drafter, alone.vocab_size, shared_cache=alone.cache_for(drafter))
    draft = least_seconds(lambda: blocks.propose([request]), alone.device)
    plain, few, many = (least_seconds(verify(rows), alone.device) for rows in (1, *SIZES))
    return max(0.0, (many - few) / (SIZES[1] - SIZES[0]) / plain), draft / plain


def least_seconds(run: Callable[[], object], device: torch.device) -> float:
    """Least time of REPEATS passes, since other work on the machine only adds to it."""
    seconds = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - started)
    return min(seconds)
