"""Are two answers of one target the same? And if not, could rounding alone have made the
difference?

A pass over one row and a pass over many run through different kernels, so logits that are equal on
paper differ in their last digits. Where two tokens are nearer to each other than that, either may
be chosen; everywhere else a difference is a mistake."""

from __future__ import annotations

import math
from collections.abc import Sequence as ListLike
from typing import NamedTuple

import torch

from d3d.core.protocols import TargetEngine
from d3d.core.types import SamplingParams
from d3d.engine.request import new_request
from d3d.engine.sampling import choice_gap

_TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 2.0**-5, torch.float16: 2.0**-8}


class Divergence(NamedTuple):
    """The first place where two answers differ."""

    position: int
    """Index in the answer, from 0."""
    gap: float
    """How far the target's choice was from falling on the one token or the other, see `choice_gap`;
    infinite where one answer ends and the other goes on, since equal tokens end alike."""
    is_rounding: bool


def tolerance(dtype: torch.dtype) -> float:
    """Gap up to which rounding may decide, for a target that computes in `dtype`: 1e-4 in float32,
    else four units in the last place of a number just above 1, for logits are rounded to one of
    them and the layers before them have been too. Raises ValueError for other than float32,
    bfloat16 and float16."""
    if dtype not in _TOLERANCES:
        raise ValueError(
            f"no tolerance is known for {dtype}; use one of {', '.join(map(str, _TOLERANCES))}"
        )
    return _TOLERANCES[dtype]


def compare(
    target: TargetEngine,
    prompt_ids: list[int],
    answers: tuple[ListLike[int], ListLike[int]],
    params: SamplingParams,
    *,
    eos_token_ids: frozenset[int] = frozenset(),
    largest_rounding: float = _TOLERANCES[torch.float32],
) -> Divergence | None:
    """None if the ids of both answers are equal, else where they part.

    The gap comes from one plain pass of `target` over the prompt and what the answers share.
    `largest_rounding`: see `tolerance`. Raises ValueError where `params` samples without a seed,
    InvalidRequest as `new_request` does."""
    if not params.greedy and params.seed is None:
        raise ValueError(
            "answers that were sampled without a seed can't be compared: give params the seed that made them"
        )
    one, other = list(answers[0]), list(answers[1])
    if one == other:
        return None
    shared = min(len(one), len(other))
    position = next((index for index in range(shared) if one[index] != other[index]), shared)
    if position == shared:
        return Divergence(position, math.inf, False)
    session = target.open(1, len(prompt_ids) + position)
    (logits,) = session.forward([prompt_ids + one[:position]], last_only=True)
    request = new_request(
        target,
        prompt_ids,
        params.model_copy(update={"stop": ()}),
        eos_token_ids=eos_token_ids,
        device=logits.device,
    )
    request.sequence.commit(one[:position])
    gap = max(
        choice_gap(logits, request.sequence, eos_token_ids, token_id)
        for token_id in (one[position], other[position])
    )
    return Divergence(position, gap, gap <= largest_rounding)


def label(divergence: Divergence | None) -> str:
    """`yes`, `no`, or `rounding (position N, gap G)`: the answer to "are the ids identical?"."""
    if divergence is None:
        return "yes"
    if not divergence.is_rounding:
        return "no"
    return f"rounding (position {divergence.position}, gap {divergence.gap:.1e})"


def summarise(divergences: ListLike[Divergence | None]) -> str:
    """The label of the worst of several comparisons: a real difference before a rounding before
    none."""
    found = sorted(
        (divergence for divergence in divergences if divergence is not None),
        key=lambda divergence: divergence.is_rounding,
    )
    return label(found[0] if found else None)
