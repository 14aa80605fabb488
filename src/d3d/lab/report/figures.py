"""Figures of a run's groups, as its tables and pictures show them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from d3d.lab.bench.answers import PLAIN
from d3d.lab.bench.methods import PEERS
from d3d.lab.bench.metrics import (
    IdentityCounts,
    RoundFigures,
    RowGroup,
    Speed,
    SpeedUp,
    identity_counts,
    round_figures,
    speed,
    speed_up,
)
from d3d.lab.bench.results import RowGroups
from d3d.lab.bench.rows import Row


@dataclass(frozen=True)
class GroupFigures:
    """Figures of one group, computed on first use."""

    groups: RowGroups
    group: RowGroup

    @property
    def method(self) -> str:
        return self.group.method

    @property
    def rows(self) -> list[Row]:
        return self.groups[self.group]

    @cached_property
    def speed(self) -> Speed:
        return speed(self.rows)

    @cached_property
    def rounds(self) -> RoundFigures | None:
        return round_figures(self.rows)

    @property
    def acceptance_length(self) -> float | None:
        return self.rounds.acceptance_length if self.rounds else None

    @cached_property
    def identity(self) -> IdentityCounts | None:
        return identity_counts(self.rows)

    @property
    def identical(self) -> str | None:
        return f"{self.identity.identical}/{self.identity.compared}" if self.identity else None

    @cached_property
    def over_plain(self) -> SpeedUp | None:
        """Speed-up over plain answers to the same set in the same setting; None for plain."""
        plain = RowGroup(PLAIN, self.group.set_name, self.group.setting.plain)
        return None if self.method == PLAIN else speed_up(self.rows, self.groups.get(plain, []))

    @cached_property
    def peer(self) -> tuple[str, list[Row]] | None:
        """The fastest plain decoding of another program on the same set and setting: its name and
        rows; None if there is none."""
        peers = {
            other.method: rows
            for other, rows in self.groups.items()
            if other.method in PEERS
            and PEERS[other.method].is_plain
            and other.set_name == self.group.set_name
            and other.setting.plain == self.group.setting.plain
        }
        timed = {name: tpot for name, rows in peers.items() if (tpot := speed(rows).tpot_s)}
        if not timed:
            return None
        fastest = min(timed, key=lambda name: timed[name])
        return fastest, peers[fastest]

    @cached_property
    def over_peer(self) -> SpeedUp | None:
        """Speed-up over `peer`; None for the peer itself."""
        if self.peer is None or self.peer[0] == self.method:
            return None
        return speed_up(self.rows, self.peer[1])


def figures_of(groups: RowGroups) -> list[GroupFigures]:
    return [GroupFigures(groups, group) for group in groups]
