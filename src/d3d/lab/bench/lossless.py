"""Compares two answers of one target, and tells a near-tie that rounding decided from a bug.

A pass over one row and a pass over many run through different kernels, so logits that are equal in
exact arithmetic differ in their last digits. If two tokens are closer than that, either may be
chosen; any other difference is a bug."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from d3d.engine.choice_gap import choice_gap
from d3d.engine.drafter import Target
from d3d.engine.params import SamplingParams
from d3d.engine.request import Request, new_request
from d3d.engine.sampling import LogitRows, TokenCounts
from d3d.lab.bench.answers import Question, TimedAnswer
from d3d.lab.bench.rows import Identity, Row

if TYPE_CHECKING:
    from d3d.api import Model

_TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 2.0**-5, torch.float16: 2.0**-8}


class Divergence(NamedTuple):
    """The first difference between two answers."""

    position: int
    """Index in the answer, from 0."""
    gap: float
    """Distance of the target's choice from either token, see `choice_gap`; infinite if one answer
    ends and the other goes on, since equal tokens end alike."""
    is_rounding: bool


def tolerance(dtype: torch.dtype) -> float:
    """Largest gap that rounding may decide, for a target that computes in `dtype`: 1e-4 in float32,
    else four units in the last place of a number just above 1, since the logits and the layers
    before them are rounded. Raises ValueError unless float32, bfloat16 or float16."""
    if dtype not in _TOLERANCES:
        known = ", ".join(map(str, _TOLERANCES))
        raise ValueError(f"no tolerance is known for {dtype}; use one of {known}")
    return _TOLERANCES[dtype]


def compare(
    target: Target,
    prompt_ids: list[int],
    answers: tuple[Sequence[int], Sequence[int]],
    params: SamplingParams,
    *,
    eos_token_ids: frozenset[int] = frozenset(),
    largest_rounding: float = _TOLERANCES[torch.float32],
) -> Divergence | None:
    """The first difference between the ids of two answers; None if they are equal.

    The gap comes from one plain pass of `target` over the prompt and the common prefix.
    `largest_rounding`: see `tolerance`. Raises ValueError if `params` samples without a seed,
    InvalidRequest as `new_request` does."""
    if not params.greedy and params.seed is None:
        raise ValueError(
            "answers that were sampled without a seed can't be compared: "
            "give params the seed that made them"
        )
    first, second = list(answers[0]), list(answers[1])
    position = first_difference(first, second)
    if position is None:
        return None
    if position == min(len(first), len(second)):
        return Divergence(position, math.inf, False)
    # a request whose answer is the common prefix: its next choice is the one in question
    request = new_request(
        target,
        prompt_ids + first[:position],
        params.model_copy(update={"stop": ()}),
        eos_token_ids=eos_token_ids,
    )
    (rows,) = read_through(target, request)
    request.prompt_length = len(prompt_ids)
    if params.uses_counts:
        request.counts = TokenCounts(prompt_ids, target.vocab_size, rows.device)
        request.counts.add(first[:position])
    gap = max(
        choice_gap(rows.logits(), request, token_id)
        for token_id in (first[position], second[position])
    )
    return Divergence(position, gap, gap <= largest_rounding)


def read_through(target: Target, request: Request) -> list[LogitRows]:
    """The logits of a request's last token, from a plain pass; the target keeps nothing."""
    try:
        rows = target.prefill([request], len(request))
    finally:
        target.end(request)
    return [row for row in rows if row is not None]


def label(divergence: Divergence | None) -> str:
    """Answers "are the ids identical?": `yes`, `no`, or `rounding (position N, gap G)`."""
    if divergence is None:
        return "yes"
    if not divergence.is_rounding:
        return "no"
    return f"rounding (position {divergence.position}, gap {divergence.gap:.1e})"


def summarise(divergences: Sequence[Divergence | None]) -> str:
    """The label of the worst of several comparisons: a real difference, else a rounding."""
    found = [divergence for divergence in divergences if divergence is not None]
    return label(min(found, key=lambda divergence: divergence.is_rounding, default=None))


def first_difference(first: Sequence[object], second: Sequence[object]) -> int | None:
    """Index of the first difference between two texts or lists of ids, the shorter one's length if
    it begins the other; None if they are equal."""
    if first == second:
        return None
    shared = min(len(first), len(second))
    return next((place for place in range(shared) if first[place] != second[place]), shared)


def identity(
    model: Model, question: Question, answer: TimedAnswer, plain: Row, params: SamplingParams
) -> Identity:
    """Compare an answer with the plain one: by ids, or by text if either has no ids."""
    plain_tokens, ids = plain.completion_tokens, answer.token_ids
    if ids is None or plain.token_ids is None:
        position = first_difference(answer.text, plain.text)
        return Identity(
            identical=position is None, by="text", plain_tokens=plain_tokens, position=position
        )
    found = compare(
        model.parts.target,
        question.token_ids,
        (plain.token_ids, ids),
        params,
        eos_token_ids=model.target.eos_token_ids,
        largest_rounding=tolerance(model.target.dtype),
    )
    position, gap, is_rounding = found or (None, math.inf, False)
    return Identity(
        identical=found is None,
        by="ids",
        plain_tokens=plain_tokens,
        position=position,
        gap=gap if math.isfinite(gap) else None,
        is_rounding=is_rounding,
    )
