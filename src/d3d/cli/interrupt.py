"""Ctrl-C in long work: it ends at once and says what is kept, or, deferred, at the next point of
consistent state."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

import typer

from d3d.cli.console import note


@contextmanager
def telling_what_is_kept(kept: Callable[[], str]) -> Iterator[None]:
    """At Ctrl-C end the command in one line, with what `kept` returns. For work that is on disk
    piece by piece."""
    try:
        yield
    except KeyboardInterrupt as error:
        note(f"interrupted; {kept()}; the same command goes on from there")
        raise typer.Exit(130) from error


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
