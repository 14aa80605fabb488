"""Progress of what takes long: on standard error, a bar where that is a terminal and plain lines
where it is a file."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TransferSpeedColumn,
)


@contextmanager
def download_bar(text: str, num_bytes: int) -> Iterator[Callable[[int], None]]:
    """Yields a function that takes the bytes there are so far."""
    console = Console(file=sys.stderr)  # bound now: what is redirected later stays apart
    if not console.is_terminal:
        console.print(f"{text} ({num_bytes / 1e6:.0f} MB)", highlight=False, soft_wrap=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
    )
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as progress:
        task = progress.add_task(text, total=num_bytes)
        yield lambda done: progress.update(task, completed=min(done, num_bytes))


@contextmanager
def steps_bar(text: str, total: int) -> Iterator[Callable[[str], None]]:
    """Prints `text`, and yields a function that starts the next of `total` steps, given its
    name."""
    console = Console(file=sys.stderr)  # bound now: what is redirected later stays apart
    console.print(text, highlight=False, soft_wrap=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as progress:
        task = progress.add_task("", total=total)
        numbers = iter(range(total))
        yield lambda name: progress.update(task, description=name, completed=next(numbers))
