"""How many rows a fused pass should have on this machine: measured pass times against the tokens
that more rows bring."""

from __future__ import annotations

import random
import time
from statistics import median

import torch

from d3d.drafting.fused import FusedEngine, FusedSession, row_price
from d3d.drafting.fused_plan import FIRST_GUESS, FusedPlan, Survival, plan_rows
from d3d.model.drafter import DrafterModel
from d3d.target.native import NativeEngine

BUDGETS = (3, 5, 8, 12, 16, 24, 32)
CONTEXT = 128
REPEATS = 5
SIMULATED_ROUNDS = 300


def best_rows(engine: NativeEngine, model: DrafterModel, draft_length: int) -> int:
    """The budget of least time per token, for a drafter that keeps FIRST_GUESS of what follows a
    kept token. Takes some forty passes."""
    fitting = [rows for rows in BUDGETS if rows + 2 <= engine.max_length] or [BUDGETS[0]]
    if len(fitting) == 1:
        return fitting[0]
    price = row_price(engine.model.device)
    return min(
        fitting,
        key=lambda rows: (
            pass_seconds(engine, model, draft_length, rows, price)
            / expected_tokens(rows, draft_length, price)
        ),
    )


def expected_tokens(rows: int, draft_length: int, price: float = 0.0) -> float:
    """Tokens a round, simulated: drafted tokens are kept with FIRST_GUESS each, and the drafter is
    now surer, now less."""
    rng = random.Random(0)
    survival = Survival(draft_length).shares
    size, tokens = 0, 0
    for _ in range(SIMULATED_ROUNDS):
        confidences = [min(1.0, max(0.0, rng.gauss(FIRST_GUESS, 0.3))) for _ in range(size)]
        plan = plan_rows(confidences, survival, rows, draft_length + rows, price)
        num_accepted = 0
        while num_accepted < plan.num_drafted and rng.random() < confidences[num_accepted]:
            num_accepted += 1
        tokens += num_accepted + 1
        size = plan.groups[num_accepted]
    return tokens / SIMULATED_ROUNDS


def pass_seconds(
    engine: NativeEngine, model: DrafterModel, draft_length: int, rows: int, price: float = 0.0
) -> float:
    """Median time of a pass of at most so many rows behind a text of at most CONTEXT tokens."""
    plan = plan_rows(
        [FIRST_GUESS] * draft_length,
        Survival(draft_length).shares,
        rows,
        draft_length + rows,
        price,
    )
    context = min(CONTEXT, engine.max_length - rows - 1)
    session = FusedEngine(engine, model, draft_length, rows).open(1, context + rows)
    ids = [token_id % engine.vocab_size for token_id in range(context)]
    session.forward([ids], last_only=True)
    times = [
        _timed(session, ids[:1] * (1 + plan.num_drafted), plan, context) for _ in range(REPEATS)
    ]
    return median(times[1:])


def _timed(session: FusedSession, token_ids: list[int], plan: FusedPlan, context: int) -> float:
    session.plans = {session.sequence_ids[0]: plan}
    started = time.perf_counter()
    logits = session.forward([token_ids])
    if logits[0].is_cuda:
        torch.cuda.synchronize(logits[0].device)
    seconds = time.perf_counter() - started
    session.crop([context])
    return seconds
