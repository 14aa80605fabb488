"""Chrome traces of target and drafter (for Perfetto): writing and reading."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn, cast, get_args

from d3d.engine.clock import Span
from d3d.engine.metrics import drafter_passes
from d3d.engine.round import Preparation, Readiness, Round
from d3d.errors import InvalidRequest
from d3d.inputs import read_json


def chrome_trace(rounds: Sequence[Round], about: dict[str, Any] | None = None) -> dict[str, Any]:
    """Trace of a request's rounds for Perfetto or chrome://tracing, starting at the first round.
    about: facts of the run to store in the file."""
    passes = drafter_passes(rounds)
    origin = min(
        [*(round_.started for round_ in rounds), *(start for start, _ in passes)], default=0.0
    )
    events: list[dict[str, Any]] = [
        {"name": "thread_name", "ph": "M", "pid": 1, "tid": tid, "args": {"name": name}}
        for tid, name in ((1, "target"), (2, "drafter"))
    ]
    for number, round_ in enumerate(rounds):
        args: dict[str, Any] = {"round": number}
        args |= {
            name: getattr(round_, name)
            for name in ("draft_length", "num_accepted", "num_committed")
        }
        if round_.looked_up:
            args["looked_up"] = True
        if round_.num_slots:
            args["num_slots"] = round_.num_slots
        if round_.num_branched:
            args["num_branched"] = round_.num_branched
        if round_.preparation is not None:
            args |= {"readiness": round_.preparation.readiness, "cause": round_.preparation.cause}
            if round_.preparation.fitted is not None:
                args["fitted"] = round_.preparation.fitted
        waiting = "switch" if args.get("readiness") == "hit" else "draft"
        events.append(
            _event(waiting, 1, (round_.started, round_.started + round_.t_draft), origin, args)
        )
        events.append(_event("verify", 1, round_.verification, origin, args))
    events += [_event("prepare", 2, span, origin, {}) for span in passes]
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": about or {}}


def _event(name: str, tid: int, span: Span, origin: float, about: dict[str, Any]) -> dict[str, Any]:
    """Complete event; times in microseconds."""
    start, end = span
    return {
        "name": name,
        "ph": "X",
        "pid": 1,
        "tid": tid,
        "ts": 1e6 * (start - origin),
        "dur": 1e6 * (end - start),
        "args": about,
    }


WAITING = ("draft", "switch")
NAMES = (*WAITING, "verify", "prepare")


def read_trace(path: Path) -> list[Round]:
    """Read the rounds of a trace, in order. All drafter passes go to the first round with a
    preparation, since a trace does not say which round received them. Raises InvalidRequest if the
    file is missing, damaged, or not written by d3d."""
    trace = read_json(path, "`d3d generate --trace` writes such a file")
    return _TraceReader(path).rounds(trace)


class _TraceReader:
    """Reads a trace and names its file in errors."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def rounds(self, trace: Any) -> list[Round]:
        events = trace.get("traceEvents") if isinstance(trace, dict) else None
        if not isinstance(events, list):
            self._refuse("it has no list of `traceEvents`")
        by_name: dict[str, list[dict[str, Any]]] = {name: [] for name in NAMES}
        for event in events:
            if not isinstance(event, dict) or not isinstance(event.get("ph"), str):
                self._refuse("an event is no object with a `ph`")
            if event["ph"] == "X":
                self._check(event)
                by_name[event["name"]].append(event)
        waits, checks = (
            self._by_round([*by_name["draft"], *by_name["switch"]]),
            self._by_round(by_name["verify"]),
        )
        if not checks and not waits:
            raise InvalidRequest(
                f"{self._path} holds no round: an answer of one token, or no trace of d3d; take a "
                "longer answer"
            )
        if sorted(checks) != list(range(len(checks))) or waits.keys() != checks.keys():
            self._refuse("its rounds are not complete")
        rounds = [self._round(waits[number], checks[number]) for number in range(len(checks))]
        passes = tuple(sorted(self._span(event) for event in by_name["prepare"]))
        prepared = next(
            (number for number, round_ in enumerate(rounds) if round_.preparation is not None), None
        )
        if passes and prepared is None:
            self._refuse("it has passes of a drafter, and no round that wanted one")
        if prepared is not None and (preparation := rounds[prepared].preparation) is not None:
            rounds[prepared] = rounds[prepared]._replace(
                preparation=preparation._replace(passes=passes)
            )
        return rounds

    def _check(self, event: dict[str, Any]) -> None:
        if event.get("name") not in NAMES or not isinstance(event.get("args"), dict):
            self._refuse(f"d3d writes no event {str(event.get('name'))[:40]!r}")
        for field in ("ts", "dur"):
            value = event.get(field)
            if (
                isinstance(value, bool)
                or not isinstance(value, int | float)
                or not math.isfinite(value)
                or value < 0
            ):
                self._refuse(f"an event `{event['name']}` has no `{field}` in microseconds")

    def _by_round(self, events: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
        by_number: dict[int, dict[str, Any]] = {}
        for event in events:
            number = self._count(event, "round")
            if number in by_number:
                self._refuse(f"round {number} is there twice")
            by_number[number] = event
        return by_number

    def _round(self, wait: dict[str, Any], check: dict[str, Any]) -> Round:
        started, waited = self._span(wait)
        readiness, preparation = check["args"].get("readiness"), None
        if readiness is not None:
            if readiness not in get_args(Readiness):
                self._refuse(f"no round is {str(readiness)[:40]!r}")
            cause = check["args"].get("cause")
            value = check["args"].get("fitted")
            fitted = value if isinstance(value, bool) else None
            preparation = Preparation(
                cast("Readiness", readiness), None if cause is None else str(cause), fitted=fitted
            )
        counts = [
            self._count(check, name) for name in ("draft_length", "num_accepted", "num_committed")
        ]
        looked_up = check["args"].get("looked_up") is True
        if counts[1] > counts[0]:
            self._refuse("a round accepted more than was drafted")
        num_slots = self._count(check, "num_slots") if "num_slots" in check["args"] else 0
        branched = self._count(check, "num_branched") if "num_branched" in check["args"] else 0
        times = waited - started, check["dur"] / 1e6, started
        return Round(
            counts[0],
            counts[1],
            counts[2],
            *times,
            preparation,
            None,
            looked_up,
            num_slots,
            num_branched=branched,
        )

    def _count(self, event: dict[str, Any], name: str) -> int:
        value = event["args"].get(name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            self._refuse(f"an event `{event['name']}` has no number `{name}`")
        return value

    @staticmethod
    def _span(event: dict[str, Any]) -> tuple[float, float]:
        return event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6

    def _refuse(self, why: str) -> NoReturn:
        raise InvalidRequest(
            f"{self._path} is no trace that d3d wrote, or a damaged one: {why}; `d3d generate "
            "--trace` writes one"
        )
