"""The pictures of a benchmark report, drawn by matplotlib as SVG. What a picture shows stands in
the table beside it."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from d3d.errors import MissingExtra

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INSTALL = "pip install 'd3d-decoding[bench]'"
COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#bbbbbb", "#222222")
"""Paul Tol's bright scheme: told apart by colour-blind readers, too."""
SIZE = (8.0, 4.0)


class Series(NamedTuple):
    """One method's points."""

    label: str
    x: Sequence[float]
    y: Sequence[float]


class Bar(NamedTuple):
    """One bar of a group, with its interval."""

    height: float
    low: float
    high: float


def lines(series: Sequence[Series], x_label: str, y_label: str, order: Sequence[str]) -> str:
    """SVG of one line a method. order: all methods of a report, so that each has one colour in all
    its pictures."""
    figure, axes = _canvas(x_label, y_label)
    for one in series:
        axes.plot(
            one.x,
            one.y,
            marker="o",
            markersize=4,
            color=_colour(order.index(one.label)),
            label=one.label,
        )
    axes.set_ylim(bottom=0)
    axes.locator_params(axis="x", integer=True)
    return _svg(figure, axes)


def grouped_bars(
    groups: Sequence[str],
    bars: Mapping[str, Sequence[Bar | None]],
    y_label: str,
    order: Sequence[str],
) -> str:
    """SVG of bars with intervals, and a line at 1: `bars[method][i]` belongs to `groups[i]`. order:
    see `lines`."""
    figure, axes = _canvas("", y_label)
    width = 0.8 / max(1, len(bars))
    for number, (label, heights) in enumerate(bars.items()):
        places = [
            (group + width * (number - (len(bars) - 1) / 2), bar)
            for group, bar in enumerate(heights)
            if bar is not None
        ]
        below = [max(0.0, bar.height - bar.low) for _, bar in places]
        above = [max(0.0, bar.high - bar.height) for _, bar in places]
        axes.bar(
            [place for place, _ in places],
            [bar.height for _, bar in places],
            width,
            yerr=[below, above],
            capsize=2,
            color=_colour(order.index(label)),
            label=label,
        )
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_xticks(range(len(groups)), groups)
    return _svg(figure, axes)


def stacked_bars(labels: Sequence[str], parts: Mapping[str, Sequence[float]], x_label: str) -> str:
    """SVG of one horizontal bar a label, made of parts."""
    figure, axes = _canvas(x_label, "")
    left = [0.0] * len(labels)
    for number, (name, lengths) in enumerate(parts.items()):
        axes.barh(range(len(labels)), list(lengths), left=left, color=_colour(number), label=name)
        left = [start + length for start, length in zip(left, lengths, strict=True)]
    axes.set_yticks(range(len(labels)), labels)
    axes.invert_yaxis()
    return _svg(figure, axes)


def new_figure(size: tuple[float, float], otherwise: str) -> Figure:
    """Size in inches. Raises MissingExtra, with the line that installs matplotlib and `otherwise`:
    what can be done without it."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtra(
            f"pictures need the library `matplotlib`: {INSTALL}, or {otherwise}"
        ) from error
    return Figure(figsize=size, layout="constrained")


def _canvas(x_label: str, y_label: str) -> tuple[Figure, Axes]:
    figure = new_figure(SIZE, "make the report without them (--no-pictures)")
    axes: Any = figure.subplots()
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.3)
    axes.set_axisbelow(True)
    return figure, axes


def _colour(number: int) -> str:
    return COLOURS[number % len(COLOURS)]


def _svg(figure: Figure, axes: Axes) -> str:
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    return encoded(figure, "svg").decode("utf-8")


def encoded(figure: Figure, kind: str) -> bytes:
    """The figure as an `svg` or `png` file. No date and no random ids are in it: the same figures
    make the same file."""
    from matplotlib import rc_context

    buffer = io.BytesIO()
    with rc_context({"svg.hashsalt": "d3d", "svg.fonttype": "none"}):
        figure.savefig(
            buffer, format=kind, dpi=150, metadata={"Date": None} if kind == "svg" else None
        )
    return buffer.getvalue()
