"""Which tests `make test-fast` runs."""

from __future__ import annotations

from collections.abc import Iterable

import pytest


def is_slow(item: pytest.Item) -> bool:
    return any(item.get_closest_marker(name) for name in ("slow", "real_model"))


def one_quick_case_each(items: Iterable[pytest.Item]) -> list[pytest.Item]:
    """The tests that aren't slow, and of each parametrized one the first case."""
    first: dict[str, pytest.Item] = {}
    for item in items:
        if not is_slow(item):
            first.setdefault(item.nodeid.partition("[")[0], item)
    return list(first.values())
