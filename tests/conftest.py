"""Fixtures that any test may ask for."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

if "PYTEST_XDIST_WORKER" in os.environ:  # before torch is imported: the workers fill the cores
    os.environ.setdefault("OMP_NUM_THREADS", "1")

from d3d.errors import D3DError
from d3d.methods.base import Parts
from support.fast import is_slow, one_quick_case_each

pytest_plugins = ["support.fixtures"]

UNMARKED_CPU_S = 5.0


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--fast",
        action="store_true",
        help="leave out tests marked slow, and run one case of each parametrized test",
    )


@pytest.hookimpl(trylast=True)  # after -k and -m have chosen
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("fast"):
        kept = one_quick_case_each(items)
        left_out = set(items).difference(kept)
        config.hook.pytest_deselected(items=[item for item in items if item in left_out])
        items[:] = kept


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Warn of a test that is too slow for `make test-fast` but isn't marked: CPU time, ended
    children included, with room for a machine several times slower than the one that wrote it."""
    before = sum(os.times()[:4])
    yield
    used = sum(os.times()[:4]) - before
    if used > UNMARKED_CPU_S and not is_slow(item):
        message = f"used {used:.1f} s of CPU: make it smaller, or list it in slow_tests.txt"
        item.warn(pytest.PytestWarning(message))


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """Directory of the real SmolLM2-135M-Instruct, fetched and converted on first use; mark such
    tests `real_model`."""
    from d3d.hub.download import fetch, find_conversion
    from d3d.hub.names import resolve_model
    from d3d.hub.presets import PRESETS

    preset = PRESETS["smollm2-135m"]
    if find_conversion(preset.target) is None:
        try:
            fetch(preset)
        except D3DError as error:
            pytest.skip(f"the real SmolLM2-135M is not to be had here: {error}")
    return resolve_model(preset.name)


@pytest.fixture(autouse=True)
def fixed_draft_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """The default draft length, which passes on this machine would decide."""

    def length(parts: Parts, **_: object) -> int:
        assert parts.drafter is not None
        return min(5, parts.drafter.config.block_size)

    monkeypatch.setattr("d3d.methods.draft_length.paying_length", length)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of the test's own."""
    directory = tmp_path / "cache"
    monkeypatch.setenv("D3D_CACHE", str(directory))
    return directory


@pytest.fixture(scope="session")
def tiny_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of a complete tiny model; not to be changed."""
    from support.tiny_model import write_tiny_target

    return write_tiny_target(tmp_path_factory.mktemp("tiny") / "target")


@pytest.fixture(scope="session")
def tiny_drafter(tiny_target: Path) -> Path:
    """Checkpoint of a drafter for it, with random deltas; not to be changed."""
    from support.tiny_model import write_tiny_drafter

    return write_tiny_drafter(tiny_target.with_name("drafter"), tiny_target)
