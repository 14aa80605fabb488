"""What `make test-fast` leaves out."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.fast import is_slow, one_quick_case_each, slow_tests


@pytest.mark.slow
def test_a_slow_test_is_left_out(request: pytest.FixtureRequest) -> None:
    assert request.node not in one_quick_case_each([request.node])


@pytest.mark.real_model
def test_a_test_of_a_real_model_is_left_out(request: pytest.FixtureRequest) -> None:
    assert request.node not in one_quick_case_each([request.node])


@pytest.mark.parametrize("case", [1, 2])
def test_the_first_case_stays(case: int, request: pytest.FixtureRequest) -> None:
    items = [
        item
        for item in request.session.items
        if item.nodeid.partition("[")[0] == request.node.nodeid.partition("[")[0]
    ]
    assert one_quick_case_each(items) == items[:1]


def test_each_listed_test_is_there(request: pytest.FixtureRequest) -> None:
    root = Path(__file__).parents[1]
    for name in slow_tests():
        file, _, test = name.partition("::")
        assert f"def {test}(" in (root / file).read_text(encoding="utf-8"), name
    assert not is_slow(request.node)
