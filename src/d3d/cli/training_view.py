"""Display of a training run: a live view on a terminal, a line at intervals in a log."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from rich.console import Group
from rich.live import Live
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from d3d.cli.console import Log, stderr

if TYPE_CHECKING:
    from d3d.train.run import TrainingRun
    from d3d.train.trainer import StepStats

RECENT = 0.95
"""Decay of the running mean of the loss, per step."""


class View(Protocol):
    """Shows the state after each step."""

    def show(self, stats: StepStats) -> None: ...


@dataclass
class LogView:
    """Plain lines in a log."""

    run: TrainingRun
    log: Log

    def show(self, stats: StepStats) -> None:
        speed = f"{stats.slots / stats.seconds:.0f} slots/s"
        best = f"best acceptance length {self.run.best:.3f}"
        self.log.show(stats.step, f"loss {stats.loss:.3f}  {speed}  {best}")


@dataclass
class LiveView:
    """A progress bar and a table, redrawn in place."""

    run: TrainingRun
    live: Live
    progress: Progress
    _mean_loss: float | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self._task = self.progress.add_task("", total=self.run.config.train.steps)

    def show(self, stats: StepStats) -> None:
        mean = stats.loss if self._mean_loss is None else self._mean_loss
        self._mean_loss = RECENT * mean + (1 - RECENT) * stats.loss
        self.progress.update(self._task, completed=stats.step)
        self.live.update(Group(self.progress, self._table(stats, self._mean_loss)))

    def _table(self, stats: StepStats, mean_loss: float) -> Table:
        table = Table.grid(padding=(0, 2))
        table.add_row("loss", f"{mean_loss:.3f}, last {stats.loss:.3f}")
        table.add_row("speed", f"{stats.slots / stats.seconds:.0f} slots/s")
        acceptance = self.run.acceptance
        if acceptance is None:
            table.add_row("held out", f"first measured at step {self.run.config.evaluate_every}")
            return table
        table.add_row(
            "acceptance length", f"{acceptance.acceptance_length:.3f}, best {self.run.best:.3f}"
        )
        shares = "  ".join(f"{share:.2f}" for share in acceptance.acceptance_at)
        table.add_row("acceptance at 1, 2, ...", shares)
        if self.run.config.bonus_recall:
            for top, recall in acceptance.bonus_recall.items():
                shares = "  ".join("-" if share is None else f"{share:.2f}" for share in recall)
                table.add_row(f"bonus in top {top} after 0, 1, ...", shares)
        return table


@contextmanager
def training_view(run: TrainingRun) -> Iterator[View]:
    """A live view if standard error is a terminal, else a log."""
    console = stderr()
    if not console.is_terminal:
        yield LogView(run, Log(run.config.train.steps))
        return
    progress = Progress(
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
    )
    with Live(progress, console=console, refresh_per_second=4) as live:
        yield LiveView(run, live, progress)
