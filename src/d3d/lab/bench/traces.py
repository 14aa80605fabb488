"""A benchmark's rounds as the planner reads them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from d3d.errors import InvalidRequest
from d3d.lab.bench.metrics import Group, further_time, grouped
from d3d.lab.bench.provenance import read_provenance
from d3d.lab.bench.rows import ROWS_FILE, Row, read_rows
from d3d.lab.plan.check import MODELLED_MODES
from d3d.lab.plan.trace import Measured, Trace, TracedRound, hit_of
from d3d.model.int8 import precision


def traces_of(directory: Path) -> list[Trace]:
    """One trace for each mode and setting of a run, all its sets together. Raises InvalidRequest
    where there is none."""
    fixed = read_provenance(directory)["fixed"]
    groups: dict[Group, list[Row]] = {}
    for group, rows in grouped(read_rows(directory / ROWS_FILE)).items():
        if (
            group.method in MODELLED_MODES and group.setting.batch == 1
        ):  # auto's rounds went through several modes
            groups.setdefault(group._replace(set_name="all"), []).extend(rows)
    dtype = precision(
        fixed["dtype"], fixed.get("quantize")
    )  # of which a profile has no passes where weights are rounded
    found = [
        _trace(f"{directory.name}: {group.label}", group, rows, dtype, fixed["threads"])
        for group, rows in groups.items()
    ]
    if not any(trace.rounds for trace in found):
        raise InvalidRequest(
            f"{directory}: no rounds of a mode of d3d, one answer at a time, in its results"
        )
    return [trace for trace in found if trace.rounds]


def _trace(source: str, group: Group, rows: Sequence[Row], dtype: str, threads: int) -> Trace:
    seconds, tokens = further_time(rows)
    measured = Measured(group.method, seconds / tokens, tokens, dtype, threads) if tokens else None
    rounds = tuple(one for row in rows for one in _rounds(row))
    each = [one for row in rows if row.acceptance is not None for one in row.acceptance.each_round]
    fallbacks = sum(one.readiness is not None and not one.draft_length for one in each)
    longest = max((one.draft_length for one in rounds), default=0)
    return Trace(source, group.method, longest, rounds, measured=measured, fallbacks=fallbacks)


def _rounds(row: Row) -> Iterator[TracedRound]:
    context = row.prompt_tokens + 1
    if row.acceptance is None:
        for place in range(row.completion_tokens - 1):
            yield TracedRound(0, 0, 1, context + place)
        return
    for number, one in enumerate(row.acceptance.each_round):
        hit, first = hit_of(one.readiness, one.fitted), number == 0
        yield TracedRound(
            one.draft_length,
            one.num_accepted,
            one.num_committed,
            context,
            hit,
            one.looked_up,
            first,
            one.num_slots,
        )
        context += one.num_committed
