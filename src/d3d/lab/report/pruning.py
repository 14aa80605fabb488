"""A pruning curve as a table and as a picture."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from d3d.engine.metrics import ratio
from d3d.lab.prune.curve import ChosenDepth, Depth, DepthTiming
from d3d.lab.report.plots import COLOURS, encoded, new_figure
from d3d.lab.report.tables import number

SIZE = (8.0, 4.2)
HEADINGS = (
    "layers",
    "removed",
    "acceptance length",
    "of full depth",
    "draft ms",
    "verify ms",
    "serial ms/token, modelled",
    "async ms/token, modelled",
    "serial ms/token, measured",
    "plain ms/token, measured",
)
MODES: tuple[Literal["serial", "async"], ...] = ("serial", "async")


def curve_table(curve: list[Depth], timings: Mapping[int, DepthTiming], chosen: ChosenDepth) -> str:
    """Markdown."""
    lines = [_line(HEADINGS), "|" + "---|" * len(HEADINGS)]
    for depth in curve:
        share = 100 * ratio(depth.judged, curve[0].judged)
        timing = timings.get(depth.layers)
        times: list[float | None] = [None] * 6
        if timing is not None:
            modelled = (timing.modelled_ms(depth.judged, mode) for mode in MODES)
            measured = (timing.measured_serial_ms, timing.measured_plain_ms)
            times = [timing.t_draft_ms, timing.t_verify_ms, *modelled, *measured]
        cells = (
            f"{depth.layers}{' (chosen)' if depth == chosen.depth else ''}",
            "" if depth.removed is None else str(depth.removed),
            f"{depth.judged:.3f}",
            f"{share:.1f} %",
            *(number(value) or "" for value in times),
        )
        lines.append(_line(cells))
    reason = f"Chosen: {chosen.depth.layers} layers, {chosen.reason}."
    return "\n".join([*lines, "", reason, ""])


def _line(cells: tuple[str, ...]) -> str:
    return "| " + " | ".join(cells) + " |"


def curve_picture(
    curve: list[Depth], timings: Mapping[int, DepthTiming], chosen: ChosenDepth
) -> str:
    """SVG: acceptance length against layers, and milliseconds a token beside it if depths were
    timed. Raises MissingExtra."""
    figure = new_figure(SIZE, "take --no-pictures")
    timed = [(depth, timings[depth.layers]) for depth in curve if depth.layers in timings]
    panels: Any = figure.subplots(1, 2 if timed else 1, squeeze=False)[0]
    layers = [depth.layers for depth in curve]
    judged = [depth.judged for depth in curve]
    choosing = [depth.acceptance_length for depth in curve]
    panels[0].plot(layers, judged, marker="o", color=COLOURS[0], label="answers that judge")
    panels[0].plot(layers, choosing, linestyle="--", color=COLOURS[6], label="answers that choose")
    panels[0].set_ylabel("acceptance length")
    if timed:
        _plot_times(panels[1], timed)
    for panel in panels:
        panel.axvline(chosen.depth.layers, color="black", linewidth=0.8)
        panel.invert_xaxis()
        panel.set_xlabel("layers of a draft (line: chosen)")
        panel.set_ylim(bottom=0)
        panel.locator_params(axis="x", integer=True)
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(alpha=0.3)
        panel.legend(frameon=False)
    return encoded(figure, "svg").decode("utf-8")


def _plot_times(panel: Any, timed: list[tuple[Depth, DepthTiming]]) -> None:
    layers = [depth.layers for depth, _ in timed]
    for place, mode in enumerate(MODES, 1):
        values = [timing.modelled_ms(depth.judged, mode) for depth, timing in timed]
        panel.plot(layers, values, marker="o", color=COLOURS[place], label=f"{mode}, modelled")
    measured = [
        (depth.layers, timing.measured_serial_ms)
        for depth, timing in timed
        if timing.measured_serial_ms is not None
    ]
    if measured:
        panel.plot(
            *zip(*measured, strict=True),
            marker="s",
            linestyle=":",
            color=COLOURS[7],
            label="serial, measured",
        )
    panel.set_ylabel("milliseconds a token")
