"""Is an answer plain decoding's own, and does it go round in circles?"""

from __future__ import annotations

import math
from collections.abc import Sequence

from d3d.api import Model
from d3d.lab.bench.answers import Answer, Question, Sampling, Setting
from d3d.lab.bench.lossless import compare, tolerance
from d3d.lab.bench.own import sampling_params
from d3d.lab.bench.rows import Identity, Row

LONGEST_LOOP = 32
"""Tokens of the longest loop that is looked for."""
REPEATED_TOKENS = 24
"""A loop is called one once it fills this many tokens at the end, and at least REPEATED_TIMES
turns."""
REPEATED_TIMES = 4


def identity(
    model: Model,
    question: Question,
    answer: Answer,
    plain: Row,
    setting: Setting,
    sampling: Sampling,
) -> Identity:
    """Where an answer parts from plain decoding's, and how undecided the target was there.

    The gap comes from one more pass of the target, see `d3d.lab.bench.lossless`. Of an answer
    without ids the text is compared."""
    plain_tokens = plain.completion_tokens
    if answer.token_ids is None or plain.token_ids is None:
        position = first_difference(answer.text, plain.text)
        return Identity(
            identical=position is None, by="text", plain_tokens=plain_tokens, position=position
        )
    found = compare(
        model.engine,
        question.token_ids,
        (plain.token_ids, answer.token_ids),
        sampling_params(setting, sampling),
        eos_token_ids=model.target.eos_token_ids,
        largest_rounding=tolerance(model.target.dtype),
    )
    if found is None:
        return Identity(identical=True, by="ids", plain_tokens=plain_tokens)
    gap = found.gap if math.isfinite(found.gap) else None
    return Identity(
        identical=False,
        by="ids",
        plain_tokens=plain_tokens,
        position=found.position,
        gap=gap,
        is_rounding=found.is_rounding,
    )


def first_difference(one: str, other: str) -> int | None:
    """Index of the first character that differs, or where the shorter text ends; None for equal
    texts."""
    if one == other:
        return None
    shared = min(len(one), len(other))
    return next((place for place in range(shared) if one[place] != other[place]), shared)


def ends_in_a_loop(token_ids: Sequence[object]) -> bool:
    """Whether the end of an answer (ids, or words) is the same few tokens over and over: speed on
    such text means nothing."""
    for period in range(1, LONGEST_LOOP + 1):
        length = period
        while length < len(token_ids) and token_ids[-length - 1] == token_ids[period - length - 1]:
            length += 1
        if length >= max(REPEATED_TOKENS, REPEATED_TIMES * period):
            return True
    return False
