"""A run's directory: its rows, and their provenance (command, files, versions, machine)."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field

from d3d.engine.round import Round
from d3d.errors import InvalidRequest
from d3d.files import FileKind, write_whole
from d3d.inputs import read_object, validated
from d3d.json_text import to_json
from d3d.lab.bench.metrics import RowGroup, further_time, grouped
from d3d.lab.bench.rows import ROWS, ROWS_FILE, Row, read_rows
from d3d.lab.plan.trace import (
    MODELLED_MODES,
    RecordedTime,
    Trace,
    bare_round,
    count_fallbacks,
    in_order,
)
from d3d.machine import machine, versions
from d3d.model.int8 import precision

PROVENANCE_FILE = "provenance.json"
FORMAT = 1
ALL_SETS = "all"
BUSY_LOAD = 0.5
"""Load of other work at the start of a run, in cores, above which its times are doubtful."""

RUN = FileKind("the provenance of a benchmark", ("format", "fixed", "sets", "sessions"))


class Fixed(BaseModel, extra="allow"):
    """Settings that stay the same within a run, as far as reports use them."""

    target: str
    dtype: str
    device: str
    threads: int
    temperature: float
    ignore_eos: bool
    quantize: str | None = None


class AskedSet(BaseModel, extra="allow"):
    """A set of prompts."""

    title: str
    sha256: str
    asked: int
    available: int


class MachineLoad(BaseModel, extra="allow"):
    """The machine when a command began."""

    processor: str
    cores: int | None
    threads: int
    gpus: list[str]
    load_at_start: float | None


class Session(BaseModel, extra="allow"):
    """One run of the command."""

    command: list[str]
    date: str
    versions: dict[str, str]
    machine: MachineLoad
    methods: dict[str, dict[str, Any]]


class Provenance(BaseModel, extra="allow"):
    """Content of the file, checked before anything reads it."""

    fixed: Fixed
    sets: dict[str, AskedSet]
    sessions: list[Session] = Field(min_length=1)


RowGroups = dict[RowGroup, list[Row]]


@dataclass(frozen=True)
class BenchRun:
    """Rows and their provenance."""

    name: str
    rows: tuple[Row, ...] = field(repr=False)
    provenance: dict[str, Any] = field(repr=False)

    @property
    def machine_was_busy(self) -> bool:
        """True if other work was running when one of the commands began."""
        sessions = self.provenance["sessions"]
        return any((one["machine"]["load_at_start"] or 0.0) > BUSY_LOAD for one in sessions)

    @property
    def precision(self) -> str:
        fixed = self.provenance["fixed"]
        return precision(fixed["dtype"], fixed.get("quantize"))

    @property
    def groups(self) -> RowGroups:
        """Rows by method, set and setting, in order of appearance; if there are several sets,
        groups over all of them follow."""
        groups = grouped(self.rows)
        return groups if len(sets_of(groups)) < 2 else groups | over_all_sets(groups)


def load_run(directory: Path) -> BenchRun:
    """Raises InvalidRequest if the directory holds no run, or no rows."""
    provenance = read_provenance(directory)
    # an answer that failed may have been asked for again
    rows = {row.key: row for row in read_rows(directory / ROWS_FILE)}
    if not rows:
        raise InvalidRequest(
            f"{directory / ROWS_FILE}: it holds no rows yet; run the benchmark first"
        )
    return BenchRun(directory.resolve().name, tuple(rows.values()), provenance)


def over_all_sets(groups: RowGroups) -> RowGroups:
    whole: RowGroups = {}
    for group, rows in groups.items():
        whole.setdefault(group._replace(set_name=ALL_SETS), []).extend(rows)
    return whole


def sets_of(groups: Iterable[RowGroup]) -> list[str]:
    return list(dict.fromkeys(group.set_name for group in groups))


def read_provenance(directory: Path) -> dict[str, Any]:
    """Raises InvalidRequest if it is missing or damaged."""
    file = directory / PROVENANCE_FILE
    if not file.exists():
        raise InvalidRequest(
            f"{directory} holds no {PROVENANCE_FILE}; give the directory of a benchmark run"
        )
    advice = "run the benchmark again"
    content = read_object(file, advice)
    if content.get("format") != FORMAT:
        raise InvalidRequest(
            f"{file}: written by another version of d3d (format {content.get('format')}); {advice}"
        )
    validated(Provenance, content, file, advice)
    return content


def begin(
    directory: Path,
    fixed: dict[str, Any],
    sets: dict[str, dict[str, Any]],
    methods: dict[str, dict[str, Any]],
) -> None:
    """Record that a run begins or resumes.

    fixed: what must stay the same within a run; sets: files and their hashes; methods: their
    descriptions. Raises InvalidRequest if the directory holds a different run."""
    file = directory / PROVENANCE_FILE
    RUN.check(file)
    ROWS.check(directory / ROWS_FILE)
    known: dict[str, Any] = {"format": FORMAT, "fixed": fixed, "sets": {}, "sessions": []}
    if file.is_file():
        known = read_provenance(directory)
    for name, value in fixed.items():
        _must_agree(directory, name, known["fixed"].get(name), value)
    for name, about in sets.items():
        before = known["sets"].get(name, about)
        _must_agree(directory, f"set {name}", before["sha256"], about["sha256"])
        known["sets"][name] = about | {"asked": max(about["asked"], before["asked"])}
    earlier: dict[str, Any] = {}
    for session in known["sessions"]:
        earlier |= session["methods"]
    for name, about in methods.items():
        _must_agree(directory, f"method {name}", earlier.get(name, about), about)
    session = {
        "command": ["d3d", *sys.argv[1:]],
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "versions": versions(),
        "machine": machine(),
        "methods": methods,
    }
    known["sessions"].append(session)
    write_whole(file, RUN, to_json(known, indent=2, ensure_ascii=False) + "\n")


def _must_agree(directory: Path, name: str, before: Any, now: Any) -> None:
    if before != now:
        raise InvalidRequest(
            f"{directory} holds a run with another {name}: {before!r}, not {now!r}; "
            "choose another name for this one, or resume it as it began"
        )


def traces_of(directory: Path) -> list[Trace]:
    """Traces of a run's rounds for the planner: one for each mode and setting, over all sets.

    Raises InvalidRequest if there is none."""
    run = load_run(directory)
    threads = run.provenance["fixed"]["threads"]
    # only modes whose rounds are all of one kind: auto's went through several
    modes = {
        group: rows
        for group, rows in grouped(run.rows).items()
        if group.method in MODELLED_MODES and group.setting.batch == 1
    }
    found = [
        _trace(f"{directory.name}: {group.label}", group.method, rows, run.precision, threads)
        for group, rows in over_all_sets(modes).items()
    ]
    traces = [trace for trace in found if trace.rounds]
    if not traces:
        raise InvalidRequest(
            f"{directory}: no rounds of a mode of d3d, one answer at a time, in its results"
        )
    return traces


def _trace(source: str, method: str, rows: Sequence[Row], dtype: str, threads: int) -> Trace:
    seconds, tokens = further_time(rows)
    measured = RecordedTime(method, seconds / tokens, tokens, dtype, threads) if tokens else None
    records = [round_ for row in rows for round_ in row.rounds]
    return Trace(
        source,
        method,
        max((round_.draft_length for round_ in records), default=0),
        tuple(traced for row in rows for traced in in_order(_records(row), row.prompt_tokens + 1)),
        measured=measured,
        fallbacks=count_fallbacks(records),
    )


def _records(row: Row) -> Sequence[Round]:
    if row.acceptance is None:
        return [bare_round(0, 0, 1)] * (row.completion_tokens - 1)
    return row.rounds
