"""How many rows a fused pass should have on this machine: measured pass times against the tokens that more rows promise."""

from __future__ import annotations

import time
from statistics import median

import torch

from d3d.drafting.fused import FusedEngine, FusedSession
from d3d.drafting.fused_plan import FIRST_GUESS, FusedPlan, Survival, plan_rows
from d3d.engines.native import NativeEngine
from d3d.models.drafter import DrafterModel

BUDGETS = (3, 5, 8, 12, 16, 24, 32)
CONTEXT = 128
REPEATS = 5


def best_rows(engine: NativeEngine, model: DrafterModel) -> int:
    """The budget of least time per token, for a drafter that keeps FIRST_GUESS of what follows a kept token. Takes some thirty passes."""
    draft_length = model.config.num_slots(model.config.block_size)
    survival = Survival(draft_length).shares
    plans = {rows: plan_rows([FIRST_GUESS] * draft_length, survival, rows, draft_length) for rows in BUDGETS}
    return min(BUDGETS, key=lambda rows: pass_seconds(engine, model, plans[rows]) / expected_tokens(plans[rows], survival))


def expected_tokens(plan: FusedPlan, survival: list[float]) -> float:
    """Tokens a round that a plan keeps up, if each round drafts as long as the groups allow."""
    return 1.0 + sum(survival[: min(plan.num_drafted, max(plan.groups))])


def pass_seconds(engine: NativeEngine, model: DrafterModel, plan: FusedPlan) -> float:
    """Median time of a pass with the plan's rows behind a text of CONTEXT tokens."""
    rows = 1 + plan.num_drafted + sum(plan.groups)
    fused = FusedEngine(engine, model, max(1, plan.num_drafted), rows)
    context = min(CONTEXT, engine.max_length - rows - 1)
    session = fused.open(1, context + rows)
    ids = [token_id % engine.vocab_size for token_id in range(context)]
    session.forward([ids], last_only=True)
    times = [_timed(session, ids[: 1 + plan.num_drafted], plan, context) for _ in range(REPEATS)]
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
