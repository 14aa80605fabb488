"""Draws what the training experiments measured: acceptance length of each, and of a long run
against slots seen.

usage: python docs/pictures/experiments.py docs/pictures/experiments.json DIRECTORY        (needs
the extra `bench`)

The JSON file holds the figures of runs that docs/results/training.md describes; each is the last
line of a run's log.jsonl, the long run all."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("svg")

import matplotlib.pyplot as plt


def main(source: str, directory: str) -> None:
    figures = json.loads(Path(source).read_text(encoding="utf-8"))
    plt.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "experiments", "font.size": 9}
    save(bars(figures["experiments"]), Path(directory) / "experiments.svg")
    save(curve(figures["long_runs"]), Path(directory) / "acceptance_against_slots.svg")


def bars(experiments: dict[str, float]) -> plt.Figure:
    """Name to acceptance length after equally many steps; the first is what the others are compared
    with."""
    names, values = list(experiments), list(experiments.values())
    figure, axes = plt.subplots(figsize=(7.2, 0.34 * len(names) + 1.0))
    colors = ["#3b6ea5"] + ["#9db8d3" if value < values[0] else "#e08a2e" for value in values[1:]]
    drawn = axes.barh(names[::-1], values[::-1], color=colors[::-1])
    axes.bar_label(drawn, fmt="%.2f", padding=3)
    axes.axvline(values[0], color="#3b6ea5", linewidth=0.8, linestyle=":")
    axes.set_xlim(1.0, max(values) + 0.25)
    axes.set_xlabel("acceptance length on 40 held-out answers after 100 steps")
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def curve(runs: dict[str, list[tuple[int, float]]]) -> plt.Figure:
    """Name to (slots seen, acceptance length)."""
    figure, axes = plt.subplots(figsize=(7.2, 3.4))
    for (name, points), color in zip(runs.items(), ("#3b6ea5", "#e08a2e", "#6aa84f"), strict=False):
        axes.plot(
            [slots / 1e6 for slots, _ in points],
            [length for _, length in points],
            marker="o",
            markersize=3,
            label=name,
            color=color,
        )
    axes.set_xlabel("slots trained on (millions)")
    axes.set_ylabel("acceptance length")
    axes.grid(color="#e5e5e5")
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def save(figure: plt.Figure, path: Path) -> None:
    figure.savefig(path, bbox_inches="tight", metadata={"Date": None})


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
