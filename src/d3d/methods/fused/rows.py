"""Best number of rows of a fused pass on this machine: measured pass times against the tokens that
more rows bring."""

from __future__ import annotations

import random
import time

import torch

from d3d.engine.drafter import Draft
from d3d.engine.request import Request
from d3d.methods.estimate import Survival
from d3d.methods.fused.engine import FusedTarget
from d3d.methods.fused.plan import PRIOR_KEPT, PRIOR_ROUNDS, RowPlan, plan_rows
from d3d.model.drafter import DrafterModel
from d3d.target.native import NativeTarget

BUDGETS = (3, 5, 8, 12, 16, 24, 32)
CONTEXT = 128
REPEATS = 9
PRICE_ROWS = (4, 16)
"""Row counts of the two passes from which the price of a row is measured."""
SIMULATED_ROUNDS = 300


def row_price(target: NativeTarget, model: DrafterModel, draft_length: int) -> float:
    """Price of one more row of a fused pass, in tokens; a plain pass is worth one."""
    plain = pass_seconds(target, model, draft_length, 1)
    few, many = (pass_seconds(target, model, draft_length, rows) for rows in PRICE_ROWS)
    first, last = PRICE_ROWS
    return max(0.0, (many - few) / (last - first) / plain)


def best_rows(
    target: NativeTarget, model: DrafterModel, draft_length: int, price: float = 0.0
) -> int:
    """Row budget with the least time per token, for a drafter with acceptance probability
    PRIOR_KEPT. price: see `plan_rows`. Takes some sixty passes."""
    fitting = [rows for rows in BUDGETS if rows + 2 <= target.max_length] or [BUDGETS[0]]
    if len(fitting) == 1:
        return fitting[0]
    return min(
        fitting,
        key=lambda rows: (
            pass_seconds(target, model, draft_length, rows, price)
            / expected_tokens(rows, draft_length, price)
        ),
    )


def expected_tokens(rows: int, draft_length: int, price: float = 0.0) -> float:
    """Simulated tokens per round: drafted tokens are kept with probability PRIOR_KEPT each, and
    confidences vary between rounds."""
    rng = random.Random(0)
    survival = Survival(draft_length, PRIOR_KEPT, PRIOR_ROUNDS).shares
    size, tokens = 0, 0
    for _ in range(SIMULATED_ROUNDS):
        confidences = [min(1.0, max(0.0, rng.gauss(PRIOR_KEPT, 0.3))) for _ in range(size)]
        plan = plan_rows(confidences, survival, rows, draft_length + rows, price)
        num_accepted = 0
        while num_accepted < plan.num_drafted and rng.random() < confidences[num_accepted]:
            num_accepted += 1
        tokens += num_accepted + 1
        size = plan.groups[num_accepted]
    return tokens / SIMULATED_ROUNDS


def pass_seconds(
    target: NativeTarget, model: DrafterModel, draft_length: int, rows: int, price: float = 0.0
) -> float:
    """Time of a pass of at most this many rows after a text of at most CONTEXT tokens: the least of
    REPEATS, since other work on the machine only adds to it."""
    survival = Survival(draft_length, PRIOR_KEPT, PRIOR_ROUNDS).shares
    confidences = [PRIOR_KEPT] * draft_length
    plan = plan_rows(confidences, survival, rows, draft_length + rows, price)
    context = min(CONTEXT, target.max_length - rows - 1)
    engine = FusedTarget(NativeTarget(target.model), model, draft_length, rows)
    request = Request([token_id % target.vocab_size for token_id in range(context)])
    engine.prefill([request], context)
    request.token_ids.append(request.token_ids[0])
    return min(_timed(engine, request, plan) for _ in range(REPEATS))


def _timed(engine: FusedTarget, request: Request, plan: RowPlan) -> float:
    engine.set_plan(request, plan)
    started = time.perf_counter()
    (rows,) = engine.verify([request], [Draft((request.token_ids[0],) * plan.num_drafted)])
    if rows.raw.is_cuda:
        torch.cuda.synchronize(rows.raw.device)
    seconds = time.perf_counter() - started
    engine.rewind([request])
    return seconds
