from __future__ import annotations

from types import SimpleNamespace

import pytest

from d3d.engine import engine as engine_module
from d3d.target.native import NativeTarget
from support.auto_runs import Clock
from support.tiny import tiny_transformer


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(engine_module, "time", SimpleNamespace(perf_counter=clock))
    return clock


@pytest.fixture(scope="module")
def target() -> NativeTarget:
    return NativeTarget(tiny_transformer(seed=1))
