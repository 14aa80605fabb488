"""The pictures of a benchmark report, each with its data."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise

from d3d.lab.bench.metrics import speed, speed_within
from d3d.lab.bench.results import ALL_SETS, sets_of
from d3d.lab.bench.rows import Row
from d3d.lab.report.figures import GroupFigures
from d3d.lab.report.plots import grouped_bars, lines, stacked_bars
from d3d.lab.report.tables import Cell, Picture, Table, milliseconds, number
from d3d.lab.stats import Interval

CONTEXT_BINS = (0, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
"""Bounds of prompt tokens."""
OUTPUT_BINS = (1, 32, 64, 128, 256, 512, 1024, 2048)
"""Bounds of answer tokens so far."""

Cells = list[tuple[Cell, ...]]
Curves = dict[str, list[tuple[float, float]]]
"""By label: points (x, y)."""


def pictures(found: list[GroupFigures]) -> Iterator[Picture]:
    """Pictures for which there is data. Answer lengths and batches are never mixed; a picture that
    shows one of each shows those of the first group."""
    first = found[0].group.setting.plain
    alike = [figures for figures in found if figures.group.setting.plain == first]
    names = sets_of(figures.group for figures in found)
    widest = ALL_SETS if ALL_SETS in names else names[0]
    whole = [figures for figures in alike if figures.group.set_name == widest]
    order = list(dict.fromkeys(figures.group.label for figures in found))
    drawn = (
        _speed_up(alike, order),
        _acceptance_at(whole, order),
        _round_times(whole),
        _context(whole, order),
        _output(whole, order),
        _batches(found, order),
    )
    return (picture for picture in drawn if picture is not None)


def _speed_up(found: list[GroupFigures], order: list[str]) -> Picture | None:
    names = sets_of(figures.group for figures in found)
    bars: dict[str, list[Interval | None]] = {}
    data: Cells = []
    for figures in found:
        group, ratio = figures.group, figures.over_plain
        if ratio is None:
            continue
        heights = bars.setdefault(group.label, [None] * len(names))
        heights[names.index(group.set_name)] = ratio.interval
        data.append((group.set_name, group.label, *map(number, ratio.interval), ratio.answers))
    if not data:
        return None
    setting = found[0].group.setting
    shape = f"at most {setting.max_tokens} tokens, batch {setting.batch}"
    table = Table(
        f"Speed-up over plain by set and method, {shape}",
        ("set", "method", "speed-up", "low", "high", "answers"),
        tuple(data),
        "Low and high: 95 % interval.",
    )
    return Picture("speed_up", grouped_bars(names, bars, "times as fast as plain", order), table)


def _acceptance_at(found: list[GroupFigures], order: list[str]) -> Picture | None:
    curves: Curves = {
        figures.group.label: list(enumerate(figures.rounds.acceptance_at, 1))
        for figures in found
        if figures.rounds and figures.rounds.acceptance_at
    }
    if not curves:
        return None
    data = [
        (label, int(place), number(share, 3))
        for label, points in curves.items()
        for place, share in points
    ]
    table = Table(
        "Share of rounds in which drafted token j was kept",
        ("method", "j", "acceptance_at[j]"),
        tuple(data),
    )
    svg = lines(curves, "drafted token j", "share of rounds", order)
    return Picture("acceptance_at", svg, table)


def _round_times(found: list[GroupFigures]) -> Picture | None:
    times: dict[str, tuple[float, float, float]] = {}
    for figures in found:
        rounds = figures.rounds
        if rounds is None or rounds.t_draft_s is None or rounds.t_verify_s is None:
            continue
        known = rounds.t_draft_s + rounds.t_verify_s
        shares = (rounds.t_draft_share or 0.0) + (rounds.t_verify_share or 0.0)
        rest = max(0.0, known / shares - known) if shares else 0.0
        parts = rounds.t_draft_s, rounds.t_verify_s, rest
        times[figures.group.label] = (1000 * parts[0], 1000 * parts[1], 1000 * parts[2])
    if not times:
        return None
    table = Table(
        "Where the time of a round goes",
        ("method", "draft ms", "verify ms", "rest ms"),
        tuple((label, *map(number, parts)) for label, parts in times.items()),
        "Means. Rest: neither draft nor verification, such as acceptance, text and the loop.",
    )
    columns = dict(zip(("draft", "verify", "rest"), zip(*times.values(), strict=True), strict=True))
    return Picture("round_times", stacked_bars(list(times), columns, "milliseconds a round"), table)


def _context(found: list[GroupFigures], order: list[str]) -> Picture | None:
    def point(rows: list[Row], low: int, high: int) -> tuple[float, float, int] | None:
        inside = [row for row in rows if low <= row.prompt_tokens < high]
        tpot = speed(inside).tpot_s
        if tpot is None:
            return None
        return sum(row.prompt_tokens for row in inside) / len(inside), tpot, len(inside)

    curves, data = _binned(found, CONTEXT_BINS, point)
    if data is None:
        return None
    headings = ("method", "prompt tokens", "answers", "tpot ms")
    table = Table("Speed against context", headings, data)
    svg = lines(curves, "mean prompt tokens", "milliseconds a token", order)
    return Picture("context", svg, table)


def _output(found: list[GroupFigures], order: list[str]) -> Picture | None:
    """Speed at the beginning of answers and further on."""

    def point(rows: list[Row], low: int, high: int) -> tuple[float, float, int] | None:
        seconds, tokens = speed_within(rows, low, high)
        return (low, seconds / tokens, tokens) if seconds else None

    curves, data = _binned(found, OUTPUT_BINS, point)
    if data is None:
        return None
    table = Table(
        "Speed against output length",
        ("method", "answer tokens", "tokens", "ms a token"),
        data,
        "Milliseconds a token of deliveries that came after so many answer tokens.",
    )
    svg = lines(curves, "answer tokens before", "milliseconds a token", order)
    return Picture("output", svg, table)


def _binned(
    found: list[GroupFigures],
    bins: tuple[int, ...],
    point: Callable[[list[Row], int, int], tuple[float, float, int] | None],
) -> tuple[Curves, tuple[tuple[Cell, ...], ...] | None]:
    """Curves in milliseconds, and their data, None for less than two bins.

    point: (rows, low, high) -> x, seconds per token and count within a bin, if any."""
    curves: Curves = {}
    data: Cells = []
    for figures in found:
        label = figures.group.label
        for low, high in pairwise(bins):
            if (values := point(figures.rows, low, high)) is not None:
                x, tpot_s, count = values
                curves.setdefault(label, []).append((x, 1000 * tpot_s))
                data.append((label, f"{low} to {high - 1}", count, milliseconds(tpot_s, 2)))
    return curves, tuple(data) if len({cells[1] for cells in data}) > 1 else None


def _batches(found: list[GroupFigures], order: list[str]) -> Picture | None:
    """Over the prompts that were answered in all batch sizes, at the answer length with the most
    batch sizes."""
    single = [figures for figures in found if figures.group.set_name != ALL_SETS]
    batches: dict[int, set[int]] = {}
    for figures in single:
        setting = figures.group.setting
        batches.setdefault(setting.max_tokens, set()).add(setting.batch)
    longest = max(batches, key=lambda length: (len(batches[length]), length))
    answers: dict[str, dict[int, dict[tuple[str, str, int], Row]]] = {}
    for figures in single:
        setting = figures.group.setting
        if setting.max_tokens == longest:
            known = answers.setdefault(figures.group.label, {}).setdefault(setting.batch, {})
            known.update({row.prompt_key: row for row in figures.rows})
    curves: Curves = {}
    data: Cells = []
    for label, by_batch in answers.items():
        shared = set.intersection(*map(set, by_batch.values())) if len(by_batch) > 1 else set()
        for batch in sorted(by_batch) if shared else ():
            rate = speed([row for key, row in by_batch[batch].items() if key in shared])
            curves.setdefault(label, []).append((batch, rate.tokens_per_s))
            data.append((label, batch, number(rate.tokens_per_s, 1), rate.answers))
    if not data:
        return None
    table = Table(
        f"Speed against batch, at most {longest} tokens",
        ("method", "batch", "tokens/s, all answers together", "answers"),
        tuple(data),
        "Of the prompts that every batch has answered.",
    )
    return Picture("batch", lines(curves, "answers decoded together", "tokens/s", order), table)
