"""What overlapped with what: figures and a trace of rounds that have times."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from d3d.core.types import RoundStats
from d3d.engine.clock import Span as Span


@dataclass(frozen=True)
class Overlap:
    """How well drafting was hidden. Times in seconds; None where there was nothing to measure."""

    hit_rate: float | None
    """Hits / rounds that wanted a successor: all that wanted a draft, but the first."""
    hit_rate_at: tuple[float | None, ...]
    """The same by the num_accepted of the verdict, 0 to draft_length."""
    late: int
    """Rounds whose successor had to be waited for."""
    fallbacks: dict[str, int]
    """Rounds that wanted a draft and had none, by cause."""
    t_draft_s: float | None
    """Median of the drafter's passes."""
    t_verify_s: float | None
    """Median of verifications."""
    t_switch_s: float | None
    """Median, over hits, from the start of a round to that of its verification."""
    exposed_draft_s: float | None
    """Mean, over all rounds, of the time that the target waited."""
    overlap_ratio: float | None
    """Time in which drafter and target both ran / the smaller of their two sums."""

    def to_dict(self) -> dict[str, Any]:
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in vars(self).items()
        }


def overlap(rounds: Sequence[RoundStats], draft_length: int) -> Overlap:
    """The figures of one request's rounds, in their order."""
    asked = [
        (before, stats)
        for before, stats in zip([None, *rounds], rounds, strict=False)
        if stats.preparation is not None
    ]
    wanting = [(before, stats) for before, stats in asked[1:] if before is not None]
    hits = [
        stats
        for _, stats in asked
        if stats.preparation is not None and stats.preparation.readiness == "hit"
    ]
    reached = [
        [_is_hit(stats) for before, stats in wanting if before.num_accepted == kept]
        for kept in range(draft_length + 1)
    ]
    causes = Counter(stats.preparation.cause for _, stats in asked if stats.preparation is not None)
    passes, verifications = drafter_passes(rounds), [verification(stats) for stats in rounds]
    less = min(_length(passes), _length(verifications))
    return Overlap(
        hit_rate=_share([_is_hit(stats) for _, stats in wanting]),
        hit_rate_at=tuple(map(_share, reached)),
        late=sum(
            stats.preparation is not None and stats.preparation.readiness == "late"
            for _, stats in asked
        ),
        fallbacks={
            cause: count for cause, count in sorted(causes.items(), key=str) if cause is not None
        },
        t_draft_s=median(end - start for start, end in passes) if passes else None,
        t_verify_s=median(_t_verify(stats) for stats in rounds) if rounds else None,
        t_switch_s=median(stats.t_draft for stats in hits) if hits else None,
        exposed_draft_s=sum(stats.t_draft for stats in rounds) / len(rounds) if rounds else None,
        overlap_ratio=common_time(passes, verifications) / less if less else None,
    )


def drafter_passes(rounds: Sequence[RoundStats]) -> list[Span]:
    """The worker's, in their order."""
    return sorted(
        span
        for stats in rounds
        if stats.preparation is not None
        for span in stats.preparation.passes
    )


def verification(stats: RoundStats) -> Span:
    if stats.device_span is not None:
        return stats.device_span
    start = stats.started + stats.t_draft
    return start, start + stats.t_verify


def common_time(first: Sequence[Span], second: Sequence[Span]) -> float:
    """Seconds in which a span of each ran; the spans of one side must not overlap each other."""
    return sum(max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a in first for b in second)


def chrome_trace(
    rounds: Sequence[RoundStats], about: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Events for Perfetto or chrome://tracing: what target and drafter did, from the first round
    on. about: facts of the run, for whoever reads the file."""
    passes = drafter_passes(rounds)
    origin = min(
        [*(stats.started for stats in rounds), *(start for start, _ in passes)], default=0.0
    )
    events: list[dict[str, Any]] = [
        {"name": "thread_name", "ph": "M", "pid": 1, "tid": tid, "args": {"name": name}}
        for tid, name in ((1, "target"), (2, "drafter"))
    ]
    for number, stats in enumerate(rounds):
        args: dict[str, Any] = {"round": number}
        args |= {
            name: getattr(stats, name) for name in ("draft_length", "num_accepted", "num_committed")
        }
        if stats.looked_up:
            args["looked_up"] = True
        if stats.num_slots:
            args["num_slots"] = stats.num_slots
        if stats.preparation is not None:
            args |= {"readiness": stats.preparation.readiness, "cause": stats.preparation.cause}
            if stats.preparation.fitted is not None:
                args["fitted"] = stats.preparation.fitted
        waiting = "switch" if args.get("readiness") == "hit" else "draft"
        events.append(
            _event(waiting, 1, (stats.started, stats.started + stats.t_draft), origin, args)
        )
        events.append(_event("verify", 1, verification(stats), origin, args))
    events += [_event("prepare", 2, span, origin, {}) for span in passes]
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": about or {}}


def _event(name: str, tid: int, span: Span, origin: float, about: dict[str, Any]) -> dict[str, Any]:
    """A complete event; its times are in microseconds."""
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


def _t_verify(stats: RoundStats) -> float:
    return stats.t_verify if stats.device_span is None else _length([stats.device_span])


def _is_hit(stats: RoundStats) -> bool:
    return stats.preparation is not None and stats.preparation.readiness == "hit"


def _share(values: Sequence[bool]) -> float | None:
    return sum(values) / len(values) if values else None


def _length(spans: Sequence[Span]) -> float:
    return sum(end - start for start, end in spans)
