"""Figures of rounds. The only place that divides: whoever reports a rate or a mean takes it from
here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from d3d.engine.clock import Span
from d3d.engine.round import Round


def ratio(part: float, whole: float) -> float:
    """part / whole; 0 if there is nothing to divide by."""
    return part / whole if whole else 0.0


def acceptance_length(rounds: Iterable[Round]) -> float:
    """Tokens committed by rounds / rounds (tau, mean acceptance length)."""
    rounds = list(rounds)
    return ratio(sum(one.num_committed for one in rounds), len(rounds))


def acceptance_length_drafted(rounds: Iterable[Round]) -> float:
    """The acceptance length over rounds that had a draft."""
    return acceptance_length(one for one in rounds if one.draft_length)


def acceptance_rate(rounds: Sequence[Round]) -> float:
    """Share of drafted tokens that were kept."""
    return ratio(sum(one.num_accepted for one in rounds), sum(one.draft_length for one in rounds))


def accepted_per_round(rounds: Sequence[Round]) -> float:
    """Mean num_accepted."""
    return ratio(sum(one.num_accepted for one in rounds), len(rounds))


def histogram(rounds: Iterable[Round], draft_length: int) -> tuple[int, ...]:
    """Rounds by num_accepted, 0 to draft_length."""
    kept = Counter(one.num_accepted for one in rounds)
    return tuple(kept[place] for place in range(draft_length + 1))


def acceptance_at(counts: Sequence[int]) -> tuple[float, ...]:
    """Share of rounds in which position 1, 2, ... was kept, from a `histogram`; not conditional."""
    total = sum(counts)
    return tuple(ratio(sum(counts[place:]), total) for place in range(1, len(counts)))


def hit_rate(*requests: Sequence[Round]) -> float | None:
    """Hits / rounds that wanted a successor: all rounds of a request that wanted a draft, but its
    first. None if there were none. requests: the rounds of each."""
    wanted = [
        readiness
        for rounds in requests
        for readiness in [one.readiness for one in rounds if one.preparation is not None][1:]
    ]
    return ratio(wanted.count("hit"), len(wanted)) if wanted else None


def tpot_s(total_s: float, ttft_s: float, num_tokens: int) -> float | None:
    """Mean seconds per token after the first; None for an answer of one token."""
    return (total_s - ttft_s) / (num_tokens - 1) if num_tokens > 1 else None


@dataclass(frozen=True)
class Overlap:
    """How well drafting was hidden. Times in seconds; None if there was nothing to measure."""

    hit_rate: float | None
    hit_rate_at: tuple[float | None, ...]
    """The hit rate by the num_accepted of the verdict, 0 to draft_length."""
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


def overlap(rounds: Sequence[Round], draft_length: int) -> Overlap:
    """The figures of one request's rounds, in their order."""
    pairs = zip([None, *rounds], rounds, strict=False)
    asked = [(before, one) for before, one in pairs if one.preparation is not None]
    wanting = [(before, one) for before, one in asked[1:] if before is not None]
    hits = [one for _, one in asked if one.readiness == "hit"]
    behind = [
        [one.readiness == "hit" for before, one in wanting if before.num_accepted == kept]
        for kept in range(draft_length + 1)
    ]
    causes = Counter(one.preparation.cause for _, one in asked if one.preparation is not None)
    passes, verifications = drafter_passes(rounds), [one.verification for one in rounds]
    less = min(_length(passes), _length(verifications))
    return Overlap(
        hit_rate=hit_rate(rounds),
        hit_rate_at=tuple(ratio(sum(hit), len(hit)) if hit else None for hit in behind),
        late=sum(one.readiness == "late" for _, one in asked),
        fallbacks={cause: n for cause, n in sorted(causes.items(), key=str) if cause is not None},
        t_draft_s=median(end - start for start, end in passes) if passes else None,
        t_verify_s=median(end - start for start, end in verifications) if rounds else None,
        t_switch_s=median(one.t_draft for one in hits) if hits else None,
        exposed_draft_s=ratio(sum(one.t_draft for one in rounds), len(rounds)) if rounds else None,
        overlap_ratio=common_time(passes, verifications) / less if less else None,
    )


def drafter_passes(rounds: Sequence[Round]) -> list[Span]:
    """The draft worker's passes, in their order."""
    return sorted(span for one in rounds if one.preparation for span in one.preparation.passes)


def common_time(first: Sequence[Span], second: Sequence[Span]) -> float:
    """Seconds in which a span of each ran; the spans of one side must not overlap each other."""
    return sum(max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a in first for b in second)


def _length(spans: Sequence[Span]) -> float:
    return sum(end - start for start, end in spans)
