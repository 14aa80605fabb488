"""Progress and notes on standard error, so that standard output holds results only."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

LOG_SECONDS = 30.0
"""Seconds between progress lines if standard error is not a terminal."""


def stderr() -> Console:
    return Console(stderr=True, highlight=False)


def note(text: str, style: str = "dim") -> None:
    """Print one line on standard error, without markup or wrapping."""
    stderr().print(Text(text, style=style), soft_wrap=True)


class Meter(Protocol):
    """Progress display."""

    def show(self, completed: int, text: str) -> None: ...


@dataclass
class Bar:
    """Progress bar on a terminal."""

    progress: Progress
    total: int

    def __post_init__(self) -> None:
        self._task = self.progress.add_task("", total=self.total)

    def show(self, completed: int, text: str) -> None:
        self.progress.update(self._task, completed=completed, description=text)


@dataclass
class Log:
    """Progress in a log: a plain line at intervals, and one at the end."""

    total: int
    every_s: float = LOG_SECONDS
    _last: float = field(default_factory=time.monotonic)

    def show(self, completed: int, text: str) -> None:
        now = time.monotonic()
        if completed >= self.total or now - self._last >= self.every_s:
            self._last = now
            print(f"{completed}/{self.total} {text}", file=sys.stderr, flush=True)


@contextmanager
def meter(total: int) -> Iterator[Meter]:
    """Progress towards `total`: a bar if standard error is a terminal, else a line every
    LOG_SECONDS."""
    console = stderr()
    if not console.is_terminal:
        yield Log(total)
        return
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as progress:
        yield Bar(progress, total)
