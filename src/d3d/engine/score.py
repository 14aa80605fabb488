"""Log-probabilities of given text: the tokens are verified like a draft that is always kept."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from d3d.engine.drafter import NO_DRAFT, Draft, Target
from d3d.engine.params import SamplingParams
from d3d.engine.request import Request
from d3d.engine.round import RoundTimes, TokenLogprob
from d3d.engine.sampling import Verdict, token_logprobs

SCORED_ROWS = 64
"""Tokens scored per pass."""


def score(
    target: Target, token_ids: Sequence[int], num_top: int = 0, *, rows_at_once: int = SCORED_ROWS
) -> Iterator[tuple[TokenLogprob, ...]]:
    """Yield the log-probabilities of all tokens but the first, given those before them: a tuple per
    pass of the target. num_top: alternatives per token."""
    request = Request(list(token_ids[:1]), SamplingParams(max_tokens=max(1, len(token_ids))))
    times = RoundTimes(0.0, 0.0, 0.0)
    try:
        (first,) = target.prefill([request], 1)
        following = list(token_ids[1:2])
        if first is None or not following:
            return
        yield token_logprobs(first.logits(), following, num_top)
        request.commit(NO_DRAFT, Verdict((), following[0]), times)
        while len(request) < len(token_ids):
            place = len(request)
            draft = Draft(tuple(token_ids[place : place + rows_at_once]))
            (rows,) = target.verify([request], [draft])
            following = list(token_ids[place : place + rows_at_once + 1])
            yield token_logprobs(rows.logits()[: len(following)], following, num_top)
            extra = following[len(draft.token_ids) :]
            request.commit(draft, Verdict(draft.token_ids, extra[0] if extra else None), times)
            target.rewind([request])
    finally:
        target.end(request)
