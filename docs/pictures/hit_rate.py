"""Draws the hit rate on recorded rounds against the outcome budget.

usage: python docs/pictures/hit_rate.py docs/pictures/hit_rate.json OUT.svg        (needs the extra
`bench`)

The JSON file holds what `d3d evaluate DRAFTER CORPUS --mode async` printed, by the label of its
curve, and of one of them the curves by num_accepted are drawn as well."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("svg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

COLOURS = ("#3b6ea5", "#e08a2e", "#6aa84f", "#a64d79", "#7f7f7f", "#c0504d")


def main(source: str, path: str) -> None:
    records = json.loads(Path(source).read_text(encoding="utf-8"))
    plt.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "hit rate", "font.size": 9}
    figure, (left, right) = plt.subplots(1, 2, figsize=(9.0, 3.6), sharey=True)
    for (label, record), colour in zip(records.items(), COLOURS, strict=False):
        draw(left, record["hit_rate"], label, colour, dashed=record["guess_from"] == "clean_rows")
    label, record = next(iter(records.items()))
    for kept, colour in zip(range(record["draft_length"] + 1), COLOURS, strict=False):
        curve = {budget: rates[kept] for budget, rates in record["hit_rate_at"].items()}
        draw(right, curve, f"{kept} accepted, {record['rounds_wanting'][kept]} rounds", colour)
    left.set_ylabel("hit rate")
    left.set_title("all rounds", fontsize=9)
    right.set_title(f"{label}, by the verdict", fontsize=9)
    figure.tight_layout()
    figure.savefig(path, bbox_inches="tight", metadata={"Date": None})


def draw(
    axes: Axes, curve: dict[str, float | None], label: str, colour: str, *, dashed: bool = False
) -> None:
    points = [(int(budget), rate) for budget, rate in curve.items() if rate is not None]
    axes.plot(
        *zip(*points, strict=True),
        marker="o",
        markersize=3,
        label=label,
        color=colour,
        linestyle="--" if dashed else "-",
    )
    axes.set_xscale("log", base=2)
    axes.set_xticks([1, 2, 4, 8, 16, 32, 64], ["1", "2", "4", "8", "16", "32", "64"])
    axes.set_ylim(0, 1.02)
    axes.set_xlabel("outcomes prepared a round")
    axes.grid(color="#e5e5e5")
    axes.legend(frameon=False, fontsize=8, loc="lower right")
    axes.spines[["top", "right"]].set_visible(False)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
