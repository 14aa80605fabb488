"""Adaptive draft length: how much of a draft is worth verifying, from what the drafter itself gives
its tokens.

One more drafted row costs the target the same whatever stands in it, and brings a token with the
chance that it and all before it are kept. So a draft is cut where that chance falls below a
threshold; the best one is about the time of a row over the time of a token, and is found by
measurement (`d3d tune`). The cut looks at the drafter's own figures alone, so nothing that is
verified depends on it."""

from __future__ import annotations

from itertools import accumulate
from operator import mul

from d3d.core.types import DraftBlock


def confident_prefix(block: DraftBlock, least: float | None, *, num_sure: int = 0) -> DraftBlock:
    """The longest beginning of a draft that is kept as a whole with a chance of at least `least`;
    maybe none. None cuts nothing.

    `num_sure`: how many of the first tokens are the target's own choice, whatever the drafter gives
    them."""
    if least is None or block.fault is not None:
        return block
    chances = (1.0,) * min(num_sure, len(block.confidences)) + block.confidences[num_sure:]
    length = sum(chance >= least for chance in accumulate(chances, mul))
    return block._replace(
        token_ids=block.token_ids[:length], confidences=block.confidences[:length]
    )
