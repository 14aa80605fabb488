"""Pictures, drawn by matplotlib. The same figures make the same file: it holds no date and no
random ids."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from d3d.errors import MissingExtra
from d3d.files import FileKind
from d3d.lab.bench.peers import INSTALL
from d3d.lab.stats import Interval

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#bbbbbb", "#222222")
"""Paul Tol's bright scheme: safe for colour-blind readers."""
SIZE = (8.0, 4.0)
AUTHOR = "written by d3d"
"""Stored in every picture."""
PICTURE = FileKind("a picture", marker=AUTHOR)

Points = Sequence[tuple[float, float]]


def lines(series: Mapping[str, Points], x_label: str, y_label: str, order: Sequence[str]) -> str:
    """SVG of one line per method. order: all methods of a report, so that each keeps its colour in
    all pictures."""
    figure, axes = _canvas(x_label, y_label)
    for label, points in series.items():
        xs, ys = zip(*points, strict=True)
        colour = _colour(order.index(label))
        axes.plot(xs, ys, marker="o", markersize=4, color=colour, label=label)
    axes.set_ylim(bottom=0)
    axes.locator_params(axis="x", integer=True)
    return _svg(figure, axes)


def grouped_bars(
    groups: Sequence[str],
    bars: Mapping[str, Sequence[Interval | None]],
    y_label: str,
    order: Sequence[str],
) -> str:
    """SVG of bars with intervals, and a line at 1: `bars[method][i]` belongs to `groups[i]`. order:
    see `lines`."""
    figure, axes = _canvas("", y_label)
    width = 0.8 / max(1, len(bars))
    for number, (label, heights) in enumerate(bars.items()):
        shift = width * (number - (len(bars) - 1) / 2)
        places = [(group + shift, bar) for group, bar in enumerate(heights) if bar is not None]
        below = [max(0.0, bar.value - bar.low) for _, bar in places]
        above = [max(0.0, bar.high - bar.value) for _, bar in places]
        axes.bar(
            [place for place, _ in places],
            [bar.value for _, bar in places],
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
    """SVG of one horizontal bar per label, made of parts."""
    figure, axes = _canvas(x_label, "")
    left = [0.0] * len(labels)
    for number, (name, lengths) in enumerate(parts.items()):
        axes.barh(range(len(labels)), list(lengths), left=left, color=_colour(number), label=name)
        left = [start + length for start, length in zip(left, lengths, strict=True)]
    axes.set_yticks(range(len(labels)), labels)
    axes.invert_yaxis()
    return _svg(figure, axes)


def new_figure(size: tuple[float, float], otherwise: str) -> Figure:
    """Size in inches. Raises MissingExtra, which says how to install matplotlib and, in
    `otherwise`, how to do without."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtra(
            f"pictures need the library `matplotlib`: {INSTALL}, or {otherwise}"
        ) from error
    return Figure(figsize=size, layout="constrained")


def encoded(figure: Figure, kind: str) -> bytes:
    """The figure as an `svg` or `png` file."""
    from matplotlib import rc_context

    buffer = io.BytesIO()
    metadata = {"Date": None, "Creator": AUTHOR} if kind == "svg" else {"Software": AUTHOR}
    with rc_context({"svg.hashsalt": "d3d", "svg.fonttype": "none"}):
        figure.savefig(buffer, format=kind, dpi=150, metadata=metadata)
    return buffer.getvalue()


def tidy(axes: Any) -> None:
    """No frame at the top and on the right, and a light grid."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.3)


def _canvas(x_label: str, y_label: str) -> tuple[Figure, Axes]:
    figure = new_figure(SIZE, "make the report without them (--no-pictures)")
    axes: Any = figure.subplots()
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    tidy(axes)
    axes.set_axisbelow(True)
    return figure, axes


def _colour(number: int) -> str:
    return COLOURS[number % len(COLOURS)]


def _svg(figure: Figure, axes: Axes) -> str:
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    return encoded(figure, "svg").decode("utf-8")
