"""Ctrl-C as a request: the work ends at the next place where its state is whole."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def deferred_interrupt() -> Iterator[Callable[[], bool]]:
    """Within, the first Ctrl-C only makes the yielded function return True; the second interrupts at once."""
    asked = False

    def first(_signal: int, _frame: FrameType | None) -> None:
        nonlocal asked
        asked = True
        signal.signal(signal.SIGINT, signal.default_int_handler)

    before = signal.signal(signal.SIGINT, first)
    try:
        yield lambda: asked
    finally:
        signal.signal(signal.SIGINT, before)
