"""A pruning curve as a table and as a picture."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from d3d.lab.prune.curve import Choice, Depth, Timing, modelled_ms
from d3d.lab.report.plots import COLOURS, encoded, new_figure, tidy
from d3d.lab.report.tables import markdown_lines, number, tabulate

SIZE = (8.0, 4.2)
MODES: tuple[Literal["serial", "async"], ...] = ("serial", "async")


def curve_table(curve: list[Depth], timings: Mapping[int, Timing], choice: Choice) -> str:
    """Markdown; cells of depths that were not timed are blank."""
    chosen = choice.depth.layers

    def timed(depth: Depth) -> list[str]:
        timing = timings.get(depth.layers)
        if timing is None:
            return [""] * 6
        values = (
            timing.t_draft_ms,
            timing.t_verify_ms,
            *(modelled_ms(depth, timing, mode) for mode in MODES),
            timing.measured_serial_ms,
            timing.measured_plain_ms,
        )
        return [number(value) or "" for value in values]

    cells = {depth.layers: timed(depth) for depth in curve}
    table = tabulate(
        "Pruning curve",
        curve,
        {
            "layers": lambda depth: f"{depth.layers}{' (chosen)' * (depth.layers == chosen)}",
            "removed": lambda depth: "" if depth.removed is None else depth.removed,
            "acceptance length": lambda depth: number(depth.judged, 3),
            "of full depth": lambda depth: f"{100 * depth.judged / curve[0].judged:.1f} %",
            "draft ms": lambda depth: cells[depth.layers][0],
            "verify ms": lambda depth: cells[depth.layers][1],
            "serial ms/token, modelled": lambda depth: cells[depth.layers][2],
            "async ms/token, modelled": lambda depth: cells[depth.layers][3],
            "serial ms/token, measured": lambda depth: cells[depth.layers][4],
            "plain ms/token, measured": lambda depth: cells[depth.layers][5],
        },
    )
    return "\n".join(markdown_lines(table)) + f"\n\nChosen: {chosen} layers, {choice.reason}.\n"


def curve_picture(curve: list[Depth], timings: Mapping[int, Timing], choice: Choice) -> str:
    """SVG: acceptance length against layers, and milliseconds per token of the depths that were
    timed. Raises MissingExtra."""
    figure = new_figure(SIZE, "take --no-pictures")
    timed = [depth for depth in curve if depth.layers in timings]
    panels: Any = figure.subplots(1, 2 if timed else 1, squeeze=False)[0]
    for name, values, style in (
        ("judge", [depth.judged for depth in curve], {"marker": "o", "color": COLOURS[0]}),
        (
            "choose",
            [depth.acceptance_length for depth in curve],
            {"linestyle": "--", "color": COLOURS[6]},
        ),
    ):
        layers = [depth.layers for depth in curve]
        panels[0].plot(layers, values, label=f"answers that {name}", **style)
    panels[0].set_ylabel("acceptance length")
    if timed:
        _draw_times(panels[1], [(depth, timings[depth.layers]) for depth in timed])
    for panel in panels:
        panel.axvline(choice.depth.layers, color="black", linewidth=0.8)
        panel.invert_xaxis()
        panel.set_xlabel("layers of a draft (line: chosen)")
        panel.set_ylim(bottom=0)
        panel.locator_params(axis="x", integer=True)
        tidy(panel)
        panel.legend(frameon=False)
    return encoded(figure, "svg").decode("utf-8")


def _draw_times(panel: Any, timed: list[tuple[Depth, Timing]]) -> None:
    layers = [depth.layers for depth, _ in timed]
    for mode, colour in zip(MODES, COLOURS[1:3], strict=True):
        values = [modelled_ms(depth, timing, mode) for depth, timing in timed]
        panel.plot(layers, values, marker="o", color=colour, label=f"{mode}, modelled")
    points = [
        (depth.layers, timing.measured_serial_ms)
        for depth, timing in timed
        if timing.measured_serial_ms is not None
    ]
    if points:
        style = {"marker": "s", "linestyle": ":", "color": COLOURS[7]}
        panel.plot(*zip(*points, strict=True), label="serial, measured", **style)
    panel.set_ylabel("milliseconds a token")
