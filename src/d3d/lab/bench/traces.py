"""A benchmark's rounds as the planner reads them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from d3d.engine.round import Round
from d3d.errors import InvalidRequest
from d3d.lab.bench.metrics import Group, further_time, grouped
from d3d.lab.bench.provenance import read_provenance
from d3d.lab.bench.rows import ROWS_FILE, Row, read_rows
from d3d.lab.plan.trace import (
    MODELLED_MODES,
    RecordedTime,
    Trace,
    bare_round,
    count_fallbacks,
    in_order,
)
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
    measured = None
    if tokens:
        measured = RecordedTime(group.method, seconds / tokens, tokens, dtype, threads)
    answers = [_rounds(row) for row in rows]
    longest = max((record.draft_length for records in answers for record in records), default=0)
    traced = (
        each
        for row, records in zip(rows, answers, strict=True)
        for each in in_order(records, row.prompt_tokens + 1)
    )
    return Trace(
        source,
        group.method,
        longest,
        tuple(traced),
        measured=measured,
        fallbacks=sum(map(count_fallbacks, answers)),
    )


def _rounds(row: Row) -> list[Round]:
    if row.acceptance is None:
        return [bare_round(0, 0, 1)] * (row.completion_tokens - 1)
    return [Round.from_json(record) for record in row.acceptance.each_round]
