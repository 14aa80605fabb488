"""Draws fused mode's speed against its rows, from what `studies/modes.py` has printed.

usage: python docs/pictures/fused_rows.py docs/pictures/fused_rows.json DIRECTORY        (needs the
extra `bench`)

The JSON file maps a set's name to the object that studies/modes.py printed for it.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")

import matplotlib.pyplot as plt

NAME = re.compile(r"(?P<mode>fused|serial) (?P<size>\d+)(?P<copies> lookup \d+)?")
COLORS = {False: "#9db8d3", True: "#3b6ea5"}


def main(source: str, directory: str) -> None:
    sets = json.loads(Path(source).read_text(encoding="utf-8"))
    plt.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "fused_rows", "font.size": 9}
    figure, axes = plt.subplots(1, len(sets), figsize=(3.1 * len(sets), 3.0), sharey=True)
    for one, (name, measured) in zip(axes, sets.items(), strict=True):
        if measured["settings"]["over"] != "plain":
            raise SystemExit(
                f"{source}: the ratios of {name} are not to plain decoding; "
                "run studies/modes.py without --over"
            )
        draw(one, measured)
        one.set_title(f"{name}, {measured['prompts']} prompts")
    axes[0].set_ylabel("times plain decoding's speed")
    axes[-1].legend(frameon=False, fontsize=7)
    figure.savefig(Path(directory) / "fused_rows.svg", bbox_inches="tight", metadata={"Date": None})


def draw(axes: Any, measured: dict[str, Any]) -> None:
    found: dict[tuple[str, bool], list[tuple[int, float]]] = {}
    for name, figures in measured.items():
        if match := NAME.fullmatch(name):
            found.setdefault((match["mode"], match["copies"] is not None), []).append(
                (int(match["size"]), figures["ratio"])
            )
    for copies, label in ((False, "fused"), (True, "fused, copies")):
        axes.plot(
            *zip(*sorted(found["fused", copies]), strict=True),
            marker="o",
            markersize=3,
            color=COLORS[copies],
            label=label,
        )
    for copies, label in ((False, "serial at its best"), (True, "serial at its best, copies")):
        best = max(ratio for _, ratio in found["serial", copies])
        axes.axhline(best, color=COLORS[copies], linewidth=0.9, linestyle="--", label=label)
    axes.axhline(1, color="black", linewidth=0.6)
    axes.set_xlabel("rows, at most")
    axes.grid(color="#e5e5e5")
    axes.spines[["top", "right"]].set_visible(False)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
