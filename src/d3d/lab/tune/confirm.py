"""The second stage: the best few setups and plain decoding answer prompts that the search has not
seen, in turn, prompt by prompt."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from d3d.errors import InvalidRequest
from d3d.lab.stats import Interval, paired_ratio
from d3d.lab.tune.measure import Measured, Measurer
from d3d.lab.tune.search import Show, Stop, Trial
from d3d.lab.tune.setups import Setup
from d3d.lab.tune.traffic import append_line


class Confirmed(NamedTuple):
    """A setup that was measured on every case of this stage."""

    setup: Setup
    cases: tuple[Measured, ...]
    speed_up: Interval
    """Over the fastest plain decoding."""
    equal: int
    """Cases with plain decoding's very ids; in bfloat16 near-ties may fall either way."""

    @property
    def ms_per_token(self) -> float:
        return 1000 * sum(one.seconds for one in self.cases) / sum(one.tokens for one in self.cases)

    @property
    def acceptance_length(self) -> float | None:
        rounds = sum(one.rounds for one in self.cases)
        return sum(one.committed for one in self.cases) / rounds if rounds else None


def finalists(best: Sequence[Trial], count: int, default: Setup) -> list[Setup]:
    """The best of the search, among them a fixed and an adaptive draft length where both were
    tried, and what is done by default."""
    chosen = [trial.setup for trial in best[:count]]
    serial = [trial.setup for trial in best if trial.setup.mode == "serial"]
    for adaptive in (False, True):
        chosen += [setup for setup in serial if setup.is_adaptive is adaptive][:1]
    return list({setup.key: setup for setup in [*chosen, default]}.values())


def with_plain(setups: Sequence[Setup]) -> list[Setup]:
    """And plain decoding, once for each number of threads that one of them has."""
    plain = {one.threads: Setup("plain", threads=one.threads) for one in setups}
    return [*plain.values(), *setups]


@dataclass
class Confirmation:
    """The second stage, new or resumed: a line in `log` for each measurement."""

    log: Path
    setups: Sequence[Setup]
    """Plain ones among them."""
    cases: Sequence[int]

    @property
    def total(self) -> int:
        return len(self.setups) * len(self.cases)

    def run(self, measure: Measurer, show: Show, stop: Stop) -> list[Confirmed] | None:
        """All setups, the fastest first; None where `stop` said so before the end."""
        done = self._known()
        for count, (setup, case) in enumerate(self._order(), 1):
            if stop():
                return None
            if (setup.key, case) not in done:
                measured = measure(setup, case)
                done[setup.key, case] = measured
                append_line(
                    self.log,
                    json.dumps(
                        {"setup": json.loads(setup.key), "case": case, **measured._asdict()}
                    ),
                )
            show(count, str(setup))
        return self._judged(done)

    def _order(self) -> Iterator[tuple[Setup, int]]:
        """Case by case; who is first moves on by one."""
        for number, case in enumerate(self.cases):
            shift = number % len(self.setups)
            for setup in [*self.setups[shift:], *self.setups[:shift]]:
                yield setup, case

    def _known(self) -> dict[tuple[str, int], Measured]:
        known: dict[tuple[str, int], Measured] = {}
        if self.log.is_file():
            for line in self.log.read_text(encoding="utf-8").split("\n"):
                try:
                    row = json.loads(line)
                    known[json.dumps(row["setup"]), row["case"]] = Measured(
                        *(row[name] for name in Measured._fields)
                    )
                except (ValueError, KeyError, TypeError):
                    continue  # torn by a kill
        return known

    def _judged(self, done: dict[tuple[str, int], Measured]) -> list[Confirmed]:
        timed = [
            case
            for case in self.cases
            if all(done[setup.key, case].tokens for setup in self.setups)
        ]
        if not timed:
            raise InvalidRequest(
                "all answers are of one token, so there is nothing to time; take other prompts"
            )
        rows = {setup.key: tuple(done[setup.key, case] for case in timed) for setup in self.setups}
        plain = min((rows[setup.key] for setup in self.setups if setup.mode == "plain"), key=_ms)
        ids = [one.answers_sha256 for one in plain]
        judged = [
            Confirmed(
                setup,
                rows[setup.key],
                paired_ratio(
                    [(one.seconds, one.tokens) for one in rows[setup.key]],
                    [(one.seconds, one.tokens) for one in plain],
                ),
                sum(
                    one.answers_sha256 == wanted
                    for one, wanted in zip(rows[setup.key], ids, strict=True)
                ),
            )
            for setup in self.setups
        ]
        return sorted(judged, key=lambda one: one.ms_per_token)


def _ms(cases: Sequence[Measured]) -> float:
    return 1000 * sum(one.seconds for one in cases) / sum(one.tokens for one in cases)
