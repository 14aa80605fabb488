"""A pruning curve as a table and as a picture."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from d3d.lab.prune.curve import Choice, Depth, Timing, modelled_ms
from d3d.lab.report.plots import COLOURS, encoded, new_figure

SIZE = (8.0, 4.2)


def curve_table(curve: list[Depth], timings: Mapping[int, Timing], choice: Choice) -> str:
    """Markdown."""
    head = [
        "layers",
        "removed",
        "acceptance length",
        "of full depth",
        "draft ms",
        "verify ms",
        "serial ms/token, modelled",
    ]
    head += ["async ms/token, modelled", "serial ms/token, measured", "plain ms/token, measured"]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for depth in curve:
        timing = timings.get(depth.layers)
        mark = " (chosen)" if depth is choice.depth or depth == choice.depth else ""
        cells = [
            f"{depth.layers}{mark}",
            "" if depth.removed is None else str(depth.removed),
            f"{depth.judged:.3f}",
        ]
        cells.append(f"{100 * depth.judged / curve[0].judged:.1f} %")
        if timing is None:
            cells += [""] * 6
        else:
            modelled = [modelled_ms(depth, timing, "serial"), modelled_ms(depth, timing, "async")]
            cells += [
                f"{value:.2f}" for value in (timing.t_draft_ms, timing.t_verify_ms, *modelled)
            ]
            cells += [
                "" if value is None else f"{value:.2f}"
                for value in (timing.measured_serial_ms, timing.measured_plain_ms)
            ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + f"\n\nChosen: {choice.depth.layers} layers, {choice.reason}.\n"


def curve_picture(curve: list[Depth], timings: Mapping[int, Timing], choice: Choice) -> str:
    """SVG: acceptance length against layers, and milliseconds a token beside it where depths were
    timed. Raises MissingExtra."""
    figure = new_figure(SIZE, "take --no-pictures")
    timed = [depth for depth in curve if depth.layers in timings]
    panels: Any = figure.subplots(1, 2 if timed else 1, squeeze=False)[0]
    panels[0].plot(
        [d.layers for d in curve],
        [d.judged for d in curve],
        marker="o",
        color=COLOURS[0],
        label="answers that judge",
    )
    choosing = [d.acceptance_length for d in curve]
    panels[0].plot(
        [d.layers for d in curve],
        choosing,
        linestyle="--",
        color=COLOURS[6],
        label="answers that choose",
    )
    panels[0].set_ylabel("acceptance length")
    if timed:
        layers = [depth.layers for depth in timed]
        for number, mode in enumerate(("serial", "async")):
            values = [
                modelled_ms(depth, timings[depth.layers], "serial" if mode == "serial" else "async")
                for depth in timed
            ]
            panels[1].plot(
                layers, values, marker="o", color=COLOURS[number + 1], label=f"{mode}, modelled"
            )
        measured = [(d.layers, timings[d.layers].measured_serial_ms) for d in timed]
        points = [(n, value) for n, value in measured if value is not None]
        if points:
            panels[1].plot(
                *zip(*points, strict=True),
                marker="s",
                linestyle=":",
                color=COLOURS[7],
                label="serial, measured",
            )
        panels[1].set_ylabel("milliseconds a token")
    for panel in panels:
        panel.axvline(choice.depth.layers, color="black", linewidth=0.8)
        panel.invert_xaxis()
        panel.set_xlabel("layers of a draft (line: chosen)")
        panel.set_ylim(bottom=0)
        panel.locator_params(axis="x", integer=True)
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(alpha=0.3)
        panel.legend(frameon=False)
    return encoded(figure, "svg").decode("utf-8")
