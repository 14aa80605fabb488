"""Output on a user's terminal: progress bars, quiet libraries, errors in one line."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TransferSpeedColumn,
)

from d3d.errors import InvalidCheckpoint


@contextmanager
def download_bar(text: str, num_bytes: int) -> Iterator[Callable[[int], None]]:
    """Show a download on standard error: a bar on a terminal, else one line.

    Yields a function that takes the number of bytes so far."""
    console = _console()
    if not console.is_terminal:
        console.print(f"{text} ({num_bytes / 1e6:.0f} MB)", highlight=False, soft_wrap=True)
    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn()
    with _progress(console, *columns) as progress:
        task = progress.add_task(text, total=num_bytes)
        yield lambda done: progress.update(task, completed=min(done, num_bytes))


@contextmanager
def steps_bar(text: str, total: int) -> Iterator[Callable[[str], None]]:
    """Print `text` on standard error, with a bar of `total` steps below it on a terminal.

    Yields a function that starts the next step, given its name."""
    console = _console()
    console.print(text, highlight=False, soft_wrap=True)
    columns = SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()
    with _progress(console, *columns) as progress:
        task = progress.add_task("", total=total)
        numbers = iter(range(total))
        yield lambda name: progress.update(task, description=name, completed=next(numbers))


def _console() -> Console:
    return Console(file=sys.stderr)  # bound now: later redirections of stderr don't touch it


def _progress(console: Console, *columns: ProgressColumn) -> Progress:
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence transformers' bars and its log lines below errors; restored afterwards."""
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


@contextmanager
def refusing(
    problem: str, advice: str = "", errors: tuple[type[Exception], ...] = (Exception,)
) -> Iterator[None]:
    """Turn errors of a library into an InvalidCheckpoint of one line: the problem, the first line
    of the error, and what to do."""
    try:
        yield
    except errors as error:
        text = f"{problem}: {first_line(error)}" + (f"; {advice}" if advice else "")
        raise InvalidCheckpoint(text) from error


def first_line(error: BaseException) -> str:
    """First line of an error's message, with the next one if it ends in a colon; the class name if
    there is no message, or only a key."""
    lines = [line.strip() for line in str(error).strip().splitlines()]
    if not lines or isinstance(error, KeyError):
        return f"{type(error).__name__} {' '.join(lines)}".strip()
    return " ".join(lines[: 2 if lines[0].endswith(":") else 1])
