"""A benchmark run as the reports read it: its rows by group, and whom each group is compared
with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from d3d.errors import InvalidRequest
from d3d.lab.bench.answers import Setting
from d3d.lab.bench.methods import PEERS, PLAIN
from d3d.lab.bench.metrics import Group, grouped, speed
from d3d.lab.bench.provenance import read_provenance
from d3d.lab.bench.rows import ROWS_FILE, Row, read_rows

ALL_SETS = "all"
BUSY_LOAD = 0.5
"""Other work at the start of a run, in cores, from which on its times are doubted."""


class Shape(NamedTuple):
    """What two groups must share to be compared."""

    max_tokens: int
    batch: int


@dataclass(frozen=True)
class Run:
    """Rows and where they come from."""

    name: str
    rows: tuple[Row, ...] = field(repr=False)
    provenance: dict[str, Any] = field(repr=False)

    @property
    def machine_was_busy(self) -> bool:
        """With other work, when any of the run's commands began."""
        return any(
            (session["machine"]["load_at_start"] or 0.0) > BUSY_LOAD
            for session in self.provenance["sessions"]
        )

    @property
    def groups(self) -> dict[Group, list[Row]]:
        """By method, set and setting, in the order in which they were first met; those over all
        sets last, where there are several."""
        groups = grouped(self.rows)
        if len({group.set_name for group in groups}) > 1:
            whole: dict[Group, list[Row]] = {}
            for group, rows in groups.items():
                whole.setdefault(group._replace(set_name=ALL_SETS), []).extend(rows)
            groups |= whole
        return groups


def load_run(directory: Path) -> Run:
    """Raises InvalidRequest where the directory holds no run, or one without rows."""
    provenance = read_provenance(directory)
    rows = read_rows(directory / ROWS_FILE)
    if not rows:
        raise InvalidRequest(
            f"{directory / ROWS_FILE}: it holds no rows yet; run the benchmark first"
        )
    return Run(directory.resolve().name, tuple(rows), provenance)


def shape(group: Group) -> Shape:
    return Shape(group.setting.max_tokens, group.setting.batch)


def plain_of(groups: dict[Group, list[Row]], group: Group) -> list[Row]:
    """Plain decoding's answers to the same prompts, in the same shape."""
    setting = Setting(max_tokens=group.setting.max_tokens, batch=group.setting.batch)
    return groups.get(Group(PLAIN, group.set_name, setting), [])


def best_plain_peer(groups: dict[Group, list[Row]], group: Group) -> tuple[str, list[Row]] | None:
    """The fastest plain decoding of another program on the same set and shape; None where there was
    none."""
    peers = {
        other.method: rows
        for other, rows in groups.items()
        if other.method in PEERS
        and PEERS[other.method].is_plain
        and other.set_name == group.set_name
        and shape(other) == shape(group)
    }
    timed = {name: tpot for name, rows in peers.items() if (tpot := speed(rows).tpot_s) is not None}
    if not timed:
        return None
    name = min(timed, key=lambda one: timed[one])
    return name, peers[name]


def sets_of(groups: Sequence[Group]) -> list[str]:
    return list(dict.fromkeys(group.set_name for group in groups))
