"""A trace's figures as a table, and its rounds as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from d3d.engine.metrics import Overlap, acceptance_length, drafter_passes, overlap
from d3d.engine.round import Round
from d3d.lab.report.plots import COLOURS, encoded, new_figure
from d3d.lab.report.tables import Cell, Table, milliseconds, number

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BLUE, RED, GREEN, YELLOW = COLOURS[:4]
MARKS = {
    "hit": ("o", GREEN),
    "miss": ("X", RED),
    "late": ("D", YELLOW),
    "unprepared": ("s", COLOURS[6]),
}
"""The mark above a round, by readiness."""
TARGET, DRAFTER, HEIGHT = 1.0, 0.0, 0.6
LOW, ABOVE = TARGET - HEIGHT / 2, TARGET + HEIGHT / 2 + 0.16
INCHES_PER_ROUND = 0.75


def figures(rounds: Sequence[Round]) -> dict[str, Any]:
    """Figures of a trace, as JSON values."""
    begin = min((round_.started for round_ in rounds), default=0.0)
    return {
        "rounds": len(rounds),
        "acceptance_length": acceptance_length(rounds) if rounds else None,
        "total_s": max((_end(round_) for round_ in rounds), default=0.0) - begin,
        **_overlap(rounds).to_dict(),
    }


def table(rounds: Sequence[Round], title: str) -> Table:
    """The same figures, one per row."""
    summary = _overlap(rounds)
    fallbacks = ", ".join(f"{cause} {count}" for cause, count in summary.fallbacks.items())
    at = " ".join(number(share) or "-" for share in summary.hit_rate_at)
    rows: list[tuple[Cell, ...]] = [
        ("rounds", len(rounds)),
        ("acceptance length", number(acceptance_length(rounds) if rounds else None)),
        ("t_draft, ms", milliseconds(summary.t_draft_s)),
        ("t_verify, ms", milliseconds(summary.t_verify_s)),
        ("t_switch, ms", milliseconds(summary.t_switch_s, 2)),
        ("exposed draft time a round, ms", milliseconds(summary.exposed_draft_s, 2)),
        ("overlap_ratio", number(summary.overlap_ratio)),
        ("hit rate", number(summary.hit_rate)),
        ("hit rate after 0, 1, ... accepted", at or None),
        ("late", summary.late),
        ("without a draft, by cause", fallbacks or "none"),
    ]
    return Table(title, ("figure", "value"), tuple(rows))


def picture(
    rounds: Sequence[Round], kind: str, *, start: int = 0, count: int | None = None
) -> bytes:
    """Draw rounds start .. start + count - 1 as `svg` or `png`; the title has the figures of all
    rounds. Raises MissingExtra without matplotlib."""
    shown = rounds[start:] if count is None else rounds[start : start + count]
    begin, end = shown[0].started, max(_end(round_) for round_ in shown)
    figure = new_figure((max(7.0, 2.5 + INCHES_PER_ROUND * len(shown)), 2.9), "leave --out away")
    axes: Axes = figure.subplots()
    for number_, round_ in enumerate(shown, start):
        _draw_round(axes, round_, number_, begin)
    passes = [
        (max(first, begin), min(last, end))
        for first, last in drafter_passes(rounds)
        if last > begin and first < end
    ]
    spans = [(1000 * (first - begin), 1000 * (last - first)) for first, last in passes]
    edges: dict[str, Any] = {"edgecolor": "white", "linewidth": 0.8}
    low = DRAFTER - HEIGHT / 2
    axes.broken_barh(spans, (low, HEIGHT), color=GREEN, label="draft worker's pass", **edges)
    axes.set_yticks([TARGET, DRAFTER], ["target", "drafter"])
    axes.set_ylim(-0.6, 1.85)
    axes.set_xlim(0.0, 1000 * (end - begin) * 1.005)
    axes.set_xlabel(
        f"ms since round {start} began; in the bars: accepted / drafted tokens, "
        "below them the round"
    )
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.set_title(_summary(rounds), fontsize=9, loc="left")
    handles = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    figure.legend(
        handles.values(),
        handles.keys(),
        loc="outside lower center",
        ncols=len(handles),
        frameon=False,
        fontsize=8,
    )
    return encoded(figure, kind)


def _draw_round(axes: Axes, round_: Round, number_: int, begin: float) -> None:
    started = 1000 * (round_.started - begin)
    checked, end = (1000 * (time - begin) for time in round_.verification)
    colour, name = (YELLOW, "switch") if round_.readiness == "hit" else (RED, "waits for a draft")
    drafted = [(started, 1000 * round_.t_draft)]
    axes.broken_barh(drafted, (LOW, HEIGHT), color=colour, label=name)
    edges: dict[str, Any] = {"edgecolor": "white", "linewidth": 0.8}
    verified = [(checked, end - checked)]
    axes.broken_barh(verified, (LOW, HEIGHT), color=BLUE, label="verify", **edges)
    middle = (checked + end) / 2
    centre: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": 7}
    kept = f"{round_.num_accepted}/{round_.draft_length}"
    axes.text(middle, TARGET, kept, color="white", **centre)
    below: dict[str, Any] = {"ha": "center", "va": "top", "fontsize": 6}
    axes.text(middle, LOW - 0.04, str(number_), color="#666666", **below)
    if round_.preparation is not None:
        name = round_.preparation.readiness
        mark, colour = MARKS[name]
        axes.scatter([started], [ABOVE], marker=mark, color=colour, s=28, label=name, clip_on=False)
        if round_.preparation.cause is not None:
            axes.text(middle, ABOVE, round_.preparation.cause, color=RED, **centre)


def _summary(rounds: Sequence[Round]) -> str:
    summary = _overlap(rounds)
    parts = {
        "t_draft": milliseconds(summary.t_draft_s),
        "t_verify": milliseconds(summary.t_verify_s),
        "t_switch": milliseconds(summary.t_switch_s, 2),
        "exposed draft": milliseconds(summary.exposed_draft_s),
    }
    shares = {"overlap_ratio": number(summary.overlap_ratio), "hit rate": number(summary.hit_rate)}
    told = [f"{name} {value} ms" for name, value in parts.items() if value is not None]
    told += [f"{name} {value}" for name, value in shares.items() if value]
    return f"{len(rounds)} rounds: {', '.join(told)}"


def _overlap(rounds: Sequence[Round]) -> Overlap:
    return overlap(rounds, max((round_.draft_length for round_ in rounds), default=0))


def _end(round_: Round) -> float:
    return round_.verification[1]
