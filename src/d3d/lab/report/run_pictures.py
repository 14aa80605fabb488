"""The pictures of a benchmark report, each with its data."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from d3d.lab.bench.methods import PLAIN
from d3d.lab.bench.metrics import Drafting, Group, drafting, speed, speed_up, speed_within
from d3d.lab.bench.rows import Row
from d3d.lab.report.plots import Bar, Series, grouped_bars, lines, stacked_bars
from d3d.lab.report.run import ALL_SETS, Shape, plain_of, sets_of, shape
from d3d.lab.report.tables import Picture, Table, milliseconds, number

Groups = dict[Group, list[Row]]
CONTEXT_BINS = (0, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
"""Bounds of tokens before the answer."""
OUTPUT_BINS = (1, 32, 64, 128, 256, 512, 1024, 2048)
"""Bounds of answer tokens that are there already."""


def pictures(groups: Groups) -> Iterator[Picture]:
    """Those for which there are data. Shapes (most tokens, batch) are never mixed in one bar; the
    first one is drawn where a picture shows one only."""
    first = shape(next(iter(groups)))
    in_shape = {group: rows for group, rows in groups.items() if shape(group) == first}
    whole = {group: rows for group, rows in in_shape.items() if group.set_name == _widest(groups)}
    order = list(dict.fromkeys(group.label for group in groups))
    drawn = (
        _speed_up(in_shape, first, order),
        _acceptance_at(whole, order),
        _round_times(whole),
        _context(whole, order),
        _output(whole, order),
        _batches(groups, order),
    )
    for picture in drawn:
        if picture is not None:
            yield picture


def _widest(groups: Groups) -> str:
    names = sets_of(list(groups))
    return ALL_SETS if ALL_SETS in names else names[0]


def _speed_up(groups: Groups, of: Shape, order: list[str]) -> Picture | None:
    names = sets_of(list(groups))
    ratios = {
        group: speed_up(rows, plain_of(groups, group))
        for group, rows in groups.items()
        if group.method != PLAIN
    }
    bars: dict[str, list[Bar | None]] = {}
    data = []
    for group, ratio in ratios.items():
        if ratio is None:
            continue
        bars.setdefault(group.label, [None] * len(names))[names.index(group.set_name)] = Bar(
            ratio.ratio, ratio.low, ratio.high
        )
        data.append(
            (
                group.set_name,
                group.label,
                number(ratio.ratio),
                number(ratio.low),
                number(ratio.high),
                ratio.answers,
            )
        )
    if not data:
        return None
    title = (
        f"Speed-up over plain by set and method, at most {of.max_tokens} tokens, batch {of.batch}"
    )
    table = Table(
        title,
        ("set", "method", "speed-up", "low", "high", "answers"),
        tuple(data),
        "Low and high: 95 % interval.",
    )
    return Picture("speed_up", grouped_bars(names, bars, "times as fast as plain", order), table)


def _drafted(groups: Groups) -> dict[str, Drafting]:
    found = {group.label: drafting(rows) for group, rows in groups.items()}
    return {label: one for label, one in found.items() if one is not None and one.rounds}


def _acceptance_at(groups: Groups, order: list[str]) -> Picture | None:
    drafted = _drafted(groups)
    series = [
        Series(label, range(1, len(one.acceptance_at) + 1), one.acceptance_at)
        for label, one in drafted.items()
    ]
    if not series:
        return None
    data = tuple(
        (one.label, int(x), number(y, 3))
        for one in series
        for x, y in zip(one.x, one.y, strict=True)
    )
    table = Table(
        "Share of rounds in which drafted token j was kept",
        ("method", "j", "acceptance_at[j]"),
        data,
    )
    return Picture(
        "acceptance_at", lines(series, "drafted token j", "share of rounds", order), table
    )


def _round_times(groups: Groups) -> Picture | None:
    timed = {
        label: (one.t_draft_s, one.t_verify_s, one.t_draft_share, one.t_verify_share)
        for label, one in _drafted(groups).items()
        if one.t_draft_s is not None and one.t_verify_s is not None
    }
    if not timed:
        return None
    parts: dict[str, list[float]] = {"draft": [], "verify": [], "rest": []}
    for t_draft, t_verify, draft_share, verify_share in timed.values():
        assert t_draft is not None
        assert t_verify is not None
        shares = (draft_share or 0.0) + (verify_share or 0.0)
        rest = max(0.0, (t_draft + t_verify) / shares - t_draft - t_verify) if shares else 0.0
        for name, seconds in zip(parts, (t_draft, t_verify, rest), strict=True):
            parts[name].append(1000 * seconds)
    data = tuple(
        (label, *(f"{parts[name][place]:.2f}" for name in parts))
        for place, label in enumerate(timed)
    )
    note = "Means. Rest: what is neither draft nor verification, such as accepting, text and the loop itself."
    table = Table(
        "Where the time of a round goes", ("method", "draft ms", "verify ms", "rest ms"), data, note
    )
    return Picture("round_times", stacked_bars(list(timed), parts, "milliseconds a round"), table)


def _context(groups: Groups, order: list[str]) -> Picture | None:
    series, data = [], []
    for group, rows in groups.items():
        points = []
        for low, high in itertools.pairwise(CONTEXT_BINS):
            inside = [row for row in rows if low <= row.prompt_tokens < high]
            tpot = speed(inside).tpot_s
            if tpot is not None:
                points.append((sum(row.prompt_tokens for row in inside) / len(inside), 1000 * tpot))
                data.append(
                    (group.label, f"{low} to {high - 1}", len(inside), milliseconds(tpot, 2))
                )
        if points:
            series.append(Series(group.label, [x for x, _ in points], [y for _, y in points]))
    if len({row[1] for row in data}) < 2:
        return None
    table = Table(
        "Speed against context", ("method", "prompt tokens", "answers", "tpot ms"), tuple(data)
    )
    return Picture(
        "context", lines(series, "mean prompt tokens", "milliseconds a token", order), table
    )


def _output(groups: Groups, order: list[str]) -> Picture | None:
    """Of the shape's whole answers; speed at their beginnings and further on."""
    series, data = [], []
    for group, rows in groups.items():
        points = []
        for low, high in itertools.pairwise(OUTPUT_BINS):
            seconds, tokens = speed_within(rows, low, high)
            if seconds:
                points.append((low, 1000 * seconds / tokens))
                data.append(
                    (group.label, f"{low} to {high - 1}", tokens, milliseconds(seconds / tokens, 2))
                )
        if points:
            series.append(Series(group.label, [x for x, _ in points], [y for _, y in points]))
    if len({row[1] for row in data}) < 2:
        return None
    note = "Milliseconds a token of the deliveries that came when so many tokens of the answer were there."
    table = Table(
        "Speed against output length",
        ("method", "answer tokens", "tokens", "ms a token"),
        tuple(data),
        note,
    )
    return Picture(
        "output", lines(series, "answer tokens before", "milliseconds a token", order), table
    )


def _batches(groups: Groups, order: list[str]) -> Picture | None:
    """Over the prompts that all batches have answered, at the answer length for which there are
    most batches."""
    single = [group for group in groups if group.set_name != ALL_SETS]
    lengths: dict[int, set[int]] = {}
    for group in single:
        lengths.setdefault(group.setting.max_tokens, set()).add(group.setting.batch)
    longest = max(lengths, key=lambda length: (len(lengths[length]), length))
    found: dict[str, dict[int, dict[tuple[str, str, int], Row]]] = {}
    for group in single:
        if group.setting.max_tokens == longest:
            answers = found.setdefault(group.label, {}).setdefault(group.setting.batch, {})
            answers.update({(row.set_name, row.prompt_id, row.turn): row for row in groups[group]})
    points = {
        label: list(_batch_points(batches)) for label, batches in found.items() if len(batches) > 1
    }
    several = {label: rates for label, rates in points.items() if rates}
    if not several:
        return None
    series = [
        Series(label, [x for x, _, _ in rates], [y for _, y, _ in rates])
        for label, rates in several.items()
    ]
    data = tuple(
        (label, batch, f"{rate:.1f}", count)
        for label, rates in several.items()
        for batch, rate, count in rates
    )
    title = f"Speed against batch, at most {longest} tokens"
    headings = ("method", "batch", "tokens/s, all answers together", "answers")
    table = Table(title, headings, data, "Of the prompts that every batch has answered.")
    return Picture("batch", lines(series, "answers decoded together", "tokens/s", order), table)


def _batch_points(
    batches: dict[int, dict[tuple[str, str, int], Row]],
) -> Iterator[tuple[int, float, int]]:
    """(batch, tokens/s, answers)."""
    shared = set.intersection(*(set(answers) for answers in batches.values()))
    for batch in sorted(batches):
        rows = [row for key, row in batches[batch].items() if key in shared]
        if rows:
            yield batch, speed(rows).tokens_per_s, len(rows)
