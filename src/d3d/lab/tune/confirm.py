"""The second stage: the best few setups and plain decoding answer prompts that the search has not
seen, taking turns prompt by prompt."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from d3d.engine.metrics import ratio
from d3d.errors import InvalidRequest
from d3d.files import FileKind, Journal
from d3d.inputs import json_or_none
from d3d.json_text import to_json
from d3d.lab.stats import Interval, paired_ratio
from d3d.lab.tune.measure import CaseResult, Measurer, ms_per_token
from d3d.lab.tune.search import Show, Stop, Trial
from d3d.lab.tune.setups import Setup


class Confirmed(NamedTuple):
    """A setup measured on every case of this stage."""

    setup: Setup
    cases: tuple[CaseResult, ...]
    speed_up: Interval
    """Over the fastest plain decoding."""
    equal: int
    """Cases with plain decoding's ids; in bfloat16 rounding may change them."""

    @property
    def ms_per_token(self) -> float:
        return ms_per_token(self.cases)

    @property
    def acceptance_length(self) -> float | None:
        rounds = sum(case.rounds for case in self.cases)
        return ratio(sum(case.committed for case in self.cases), rounds) if rounds else None


def finalists(best: Sequence[Trial], count: int, default: Setup) -> list[Setup]:
    """The best of the search, a fixed and an adaptive draft length among them if both were tried,
    and the default."""
    chosen = [trial.setup for trial in best[:count]]
    serial = [trial.setup for trial in best if trial.setup.mode == "serial"]
    for adaptive in (False, True):
        chosen += [setup for setup in serial if setup.is_adaptive is adaptive][:1]
    return list({setup.key: setup for setup in [*chosen, default]}.values())


def with_plain(setups: Sequence[Setup]) -> list[Setup]:
    """The setups after plain decoding with each of their numbers of threads."""
    plain = {setup.threads: Setup(threads=setup.threads) for setup in setups}
    return [*plain.values(), *setups]


CONFIRMATIONS = FileKind("a list of confirmed setups", ("setup", "case"))


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
        """All setups, the fastest first; None if `stop` ended it early."""
        journal = Journal(self.log, CONFIRMATIONS)
        results = _read(journal)
        for count, (setup, case) in enumerate(self._order(), 1):
            if stop():
                return None
            if (setup.key, case) not in results:
                result = results[setup.key, case] = measure(setup, case)
                row = {"setup": json.loads(setup.key), "case": case, **result._asdict()}
                journal.append(to_json(row))
            show(count, str(setup))
        return self._judged(results)

    def _order(self) -> Iterator[tuple[Setup, int]]:
        """Case by case, each beginning with the next setup."""
        for number, case in enumerate(self.cases):
            shift = number % len(self.setups)
            for setup in [*self.setups[shift:], *self.setups[:shift]]:
                yield setup, case

    def _judged(self, results: dict[tuple[str, int], CaseResult]) -> list[Confirmed]:
        timed = [
            case
            for case in self.cases
            if all(results[setup.key, case].tokens for setup in self.setups)
        ]
        if not timed:
            raise InvalidRequest(
                "all answers are of one token, so there is nothing to time; take other prompts"
            )
        rows = {
            setup.key: tuple(results[setup.key, case] for case in timed) for setup in self.setups
        }
        plain_rows = (rows[setup.key] for setup in self.setups if setup.mode == "plain")
        plain = min(plain_rows, key=ms_per_token)
        judged = [_confirmed(setup, rows[setup.key], plain) for setup in self.setups]
        return sorted(judged, key=lambda confirmed: confirmed.ms_per_token)


def _confirmed(
    setup: Setup, cases: tuple[CaseResult, ...], plain: tuple[CaseResult, ...]
) -> Confirmed:
    totals, plain_totals = ([(case.seconds, case.tokens) for case in row] for row in (cases, plain))
    pairs = zip(cases, plain, strict=True)
    equal = sum(case.answers_sha256 == other.answers_sha256 for case, other in pairs)
    return Confirmed(setup, cases, paired_ratio(totals, plain_totals), equal)


def _read(journal: Journal) -> dict[tuple[str, int], CaseResult]:
    """Results by setup and case."""
    results: dict[tuple[str, int], CaseResult] = {}
    for _, line in journal.lines():
        row = json_or_none(line)
        try:
            fields = (row[name] for name in CaseResult._fields)
            results[to_json(row["setup"]), row["case"]] = CaseResult(*fields)
        except (KeyError, TypeError):
            continue  # torn by a kill
    return results
