"""Deferred Ctrl-C and SIGTERM: the work ends at the next point of consistent state."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def deferred_interrupt() -> Iterator[Callable[[], bool]]:
    """Inside this context the first signal only makes the yielded function return True; the second
    interrupts at once."""
    asked = False

    def first(_signal: int, _frame: FrameType | None) -> None:
        nonlocal asked
        asked = True
        for number in before:
            signal.signal(number, signal.default_int_handler)

    before = {number: signal.signal(number, first) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
