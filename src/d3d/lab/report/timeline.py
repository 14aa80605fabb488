"""What a trace shows: its figures as a table, and who ran when as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from d3d.core.types import RoundStats
from d3d.decoding.timeline import verification
from d3d.engine.metrics import Overlap, drafter_passes, overlap
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
"""A round's readiness: the mark above its lane."""
TARGET, DRAFTER, HEIGHT = 1.0, 0.0, 0.6
INCHES_A_ROUND = 0.75


def figures(rounds: Sequence[RoundStats]) -> dict[str, Any]:
    """JSON-ready: what a trace's rounds add up to."""
    committed = sum(stats.num_committed for stats in rounds)
    return {
        "rounds": len(rounds),
        "acceptance_length": committed / len(rounds) if rounds else None,
        "total_s": max((_end(stats) for stats in rounds), default=0.0)
        - min((stats.started for stats in rounds), default=0.0),
        **_overlap(rounds).to_dict(),
    }


def table(rounds: Sequence[RoundStats], title: str) -> Table:
    """The same, one figure a row."""
    known, summary = figures(rounds), _overlap(rounds)
    fallbacks = ", ".join(f"{cause} {count}" for cause, count in summary.fallbacks.items())
    at = " ".join(number(share) or "-" for share in summary.hit_rate_at)
    rows: list[tuple[Cell, ...]] = [
        ("rounds", known["rounds"]),
        ("acceptance length", number(known["acceptance_length"])),
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
    rounds: Sequence[RoundStats], kind: str, *, start: int = 0, count: int | None = None
) -> bytes:
    """An `svg` or `png` of rounds start .. start + count - 1; the line of figures above it is that
    of all rounds.

    Raises MissingExtra without matplotlib.
    """
    shown = rounds[start:] if count is None else rounds[start : start + count]
    begin, end = shown[0].started, max(_end(stats) for stats in shown)
    figure = new_figure((max(7.0, 2.5 + INCHES_A_ROUND * len(shown)), 2.9), "leave --out away")
    axes: Axes = figure.subplots()
    for number_, stats in enumerate(shown, start):
        _draw_round(axes, stats, number_, begin)
    passes = [
        (max(a, begin), min(b, end)) for a, b in drafter_passes(rounds) if b > begin and a < end
    ]
    spans = [(1000 * (a - begin), 1000 * (b - a)) for a, b in passes]
    axes.broken_barh(
        spans,
        (DRAFTER - HEIGHT / 2, HEIGHT),
        color=GREEN,
        edgecolor="white",
        linewidth=0.8,
        label="draft worker's pass",
    )
    axes.set_yticks([TARGET, DRAFTER], ["target", "drafter"])
    axes.set_ylim(-0.6, 1.85)
    axes.set_xlim(0.0, 1000 * (end - begin) * 1.005)
    axes.set_xlabel(
        f"ms since round {start} began; in the bars: accepted / drafted tokens, below them the round"
    )
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.set_title(_line(rounds), fontsize=9, loc="left")
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


def _draw_round(axes: Axes, stats: RoundStats, number_: int, begin: float) -> None:
    low = TARGET - HEIGHT / 2
    started, (checked, end) = stats.started - begin, verification(stats)
    hit = stats.preparation is not None and stats.preparation.readiness == "hit"
    colour, name = (YELLOW, "switch") if hit else (RED, "waits for a draft")
    axes.broken_barh(
        [(1000 * started, 1000 * stats.t_draft)], (low, HEIGHT), color=colour, label=name
    )
    axes.broken_barh(
        [(1000 * (checked - begin), 1000 * (end - checked))],
        (low, HEIGHT),
        color=BLUE,
        edgecolor="white",
        linewidth=0.8,
        label="verify",
    )
    middle = 1000 * ((checked + end) / 2 - begin)
    axes.text(
        middle,
        TARGET,
        f"{stats.num_accepted}/{stats.draft_length}",
        ha="center",
        va="center",
        color="white",
        fontsize=7,
    )
    axes.text(middle, low - 0.04, str(number_), ha="center", va="top", color="#666666", fontsize=6)
    if stats.preparation is not None:
        mark, colour = MARKS[stats.preparation.readiness]
        name = stats.preparation.readiness
        axes.scatter(
            [1000 * started],
            [TARGET + HEIGHT / 2 + 0.16],
            marker=mark,
            color=colour,
            s=28,
            label=name,
            clip_on=False,
        )
        if stats.preparation.cause is not None:
            axes.text(
                middle,
                TARGET + HEIGHT / 2 + 0.16,
                stats.preparation.cause,
                ha="center",
                va="center",
                color=RED,
                fontsize=7,
            )


def _line(rounds: Sequence[RoundStats]) -> str:
    summary = _overlap(rounds)
    parts = {
        "t_draft": milliseconds(summary.t_draft_s),
        "t_verify": milliseconds(summary.t_verify_s),
        "t_switch": milliseconds(summary.t_switch_s, 2),
        "exposed draft": milliseconds(summary.exposed_draft_s),
    }
    times = [f"{name} {value} ms" for name, value in parts.items() if value is not None]
    shares = {"overlap_ratio": number(summary.overlap_ratio), "hit rate": number(summary.hit_rate)}
    return ", ".join(
        [
            f"{len(rounds)} rounds: {times[0]}",
            *times[1:],
            *(f"{name} {value}" for name, value in shares.items() if value),
        ]
    )


def _overlap(rounds: Sequence[RoundStats]) -> Overlap:
    return overlap(rounds, max((stats.draft_length for stats in rounds), default=0))


def _end(stats: RoundStats) -> float:
    return verification(stats)[1]
