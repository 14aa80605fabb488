from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from d3d.target.native import NativeTarget
from support.tiny import tiny_transformer


@pytest.fixture(scope="session")
def target() -> NativeTarget:
    """A Llama-like target of 97 tokens and 512 positions."""
    return NativeTarget(tiny_transformer())


@pytest.fixture(autouse=True)
def _no_thread_stays() -> Iterator[None]:
    """Whatever a test did to a worker, nothing of d3d's runs on (but a thread that was told to
    hang)."""
    before = set(threading.enumerate())
    yield
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        left = [
            t
            for t in set(threading.enumerate()) - before
            if t.name.startswith("d3d-") and not getattr(t, "may_stay", False)
        ]
        if not left:
            return
        time.sleep(0.01)
    raise AssertionError(f"threads left behind: {left}")
