"""Draws who sees whom in one fused pass, from the layout that decoding uses.

usage: python docs/pictures/fused_pass.py OUT.svg        (needs the extra `bench`)
"""

from __future__ import annotations

import sys

import matplotlib
import torch

matplotlib.use("svg")

import matplotlib.pyplot as plt
from matplotlib.colors import ListedColormap
from matplotlib.patches import Patch

from d3d.methods.fused.engine import fused_layout
from d3d.model.drafter import DeltaConfig, DrafterConfig

CACHED, GROUPS = 4, (3, 2, 1)
CLEAN, SLOT = 1, 2


def main(path: str) -> None:
    config = DrafterConfig(kept_layers=(0,), delta=DeltaConfig(rank=1))
    layout = fused_layout(config, [CACHED], [[0] * len(GROUPS)], [GROUPS])
    rows = ["anchor", *(f"d{i}" for i in range(1, len(GROUPS)))]
    slots = [
        f"{rows[row]} · {depth + 1}" for row, size in enumerate(GROUPS) for depth in range(size)
    ]
    kinds = [CLEAN] * (CACHED + len(rows)) + [SLOT] * len(slots)
    seen = layout.mask[0].int() * torch.tensor(kinds)
    plt.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "fused"}
    figure, axes = plt.subplots(figsize=(7.2, 4.6))
    axes.imshow(
        seen, cmap=ListedColormap(["#f2f2f2", "#3b6ea5", "#e08a2e"]), vmin=0, vmax=2, aspect="equal"
    )
    axes.set_xticks(
        range(len(kinds)),
        [f"text {i + 1}" for i in range(CACHED)] + rows + slots,
        rotation=90,
        fontsize=8,
    )
    axes.set_yticks(range(len(rows) + len(slots)), rows + slots, fontsize=8)
    axes.set_xticks([x - 0.5 for x in range(len(kinds) + 1)], minor=True)
    axes.set_yticks([y - 0.5 for y in range(len(rows) + len(slots) + 1)], minor=True)
    axes.grid(which="minor", color="white", linewidth=1.5)
    axes.tick_params(which="both", length=0)
    axes.set_ylabel("rows of the pass")
    axes.set_title(
        "One fused pass: clean rows verify, slots behind each of them draft", fontsize=10
    )
    legend = [
        Patch(color="#3b6ea5", label="sees a clean token"),
        Patch(color="#e08a2e", label="sees a slot of its group"),
    ]
    axes.legend(
        handles=legend,
        loc="upper center",
        bbox_to_anchor=(0.5, -0.28),
        ncols=2,
        fontsize=8,
        frameon=False,
    )
    figure.savefig(path, bbox_inches="tight", metadata={"Date": None})


if __name__ == "__main__":
    main(sys.argv[1])
