"""Which tests `make test-fast` runs."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from pathlib import Path

import pytest

SLOW_TESTS = Path(__file__).parents[1] / "slow_tests.txt"
"""Tests that take more than a tenth of a second or so, fixtures included, without their cases: from
`pytest --fast --durations=0`."""


@cache
def slow_tests() -> frozenset[str]:
    return frozenset(SLOW_TESTS.read_text(encoding="utf-8").split())


def is_slow(item: pytest.Item) -> bool:
    if any(item.get_closest_marker(name) for name in ("slow", "real_model")):
        return True
    return item.nodeid.partition("[")[0] in slow_tests()


def one_quick_case_each(items: Iterable[pytest.Item]) -> list[pytest.Item]:
    """The tests that aren't slow, and of each parametrized one the first case."""
    first: dict[str, pytest.Item] = {}
    for item in items:
        if not is_slow(item):
            first.setdefault(item.nodeid.partition("[")[0], item)
    return list(first.values())
