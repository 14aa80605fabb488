"""Curves of a training run for TensorBoard."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from d3d.errors import MissingExtra
from d3d.train.trainer import StepStats


class Curves:
    """Loss, learning rate and speed of every step, and what each measurement found."""

    def __init__(self, directory: Path) -> None:
        """Raises MissingExtra where TensorBoard is not installed."""
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise MissingExtra(
                "tensorboard: true needs TensorBoard: pip install 'd3d-decoding[train]', or leave the key out (log.jsonl is always written)"
            ) from error
        self._writer = SummaryWriter(str(directory))

    def step(self, stats: StepStats, learning_rate: float) -> None:
        self._writer.add_scalar("train/loss", stats.loss, stats.step)
        self._writer.add_scalar("train/learning_rate", learning_rate, stats.step)
        self._writer.add_scalar("train/slots_per_second", stats.slots / stats.seconds, stats.step)

    def measured(self, row: dict[str, Any]) -> None:
        """row: a line of log.jsonl."""
        step = row["step"]
        self._writer.add_scalar("held_out/acceptance_length", row["acceptance_length"], step)
        for place, share in enumerate(row["acceptance_at"], 1):
            self._writer.add_scalar(f"held_out/acceptance_at_{place:02}", share, step)
        for top, recall in row.get("bonus_recall", {}).items():
            for num_accepted, share in enumerate(recall):
                if share is not None:
                    self._writer.add_scalar(
                        f"held_out/bonus_recall_top_{top}/num_accepted_{num_accepted:02}",
                        share,
                        step,
                    )
        self._writer.flush()
