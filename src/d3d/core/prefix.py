"""How far two texts agree."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile


def common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    """How many token ids both begin with."""
    return sum(
        1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False))
    )
