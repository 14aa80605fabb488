"""Metrics of rounds. Every rate and mean is computed here, and nowhere else."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from d3d.engine.clock import Span
from d3d.engine.round import Round


def ratio(part: float, whole: float) -> float:
    """part / whole; 0 if `whole` is 0."""
    return part / whole if whole else 0.0


def acceptance_length(rounds: Iterable[Round]) -> float:
    """Tokens committed by rounds / rounds (tau, mean acceptance length)."""
    rounds = list(rounds)
    return ratio(sum(round_.num_committed for round_ in rounds), len(rounds))


def acceptance_length_drafted(rounds: Iterable[Round]) -> float:
    """Acceptance length over rounds that had a draft."""
    return acceptance_length(round_ for round_ in rounds if round_.draft_length)


def acceptance_rate(rounds: Sequence[Round]) -> float:
    """Share of drafted tokens that were kept."""
    return ratio(
        sum(round_.num_accepted for round_ in rounds), sum(round_.num_nodes for round_ in rounds)
    )


def accepted_per_round(rounds: Sequence[Round]) -> float:
    """Mean num_accepted."""
    return ratio(sum(round_.num_accepted for round_ in rounds), len(rounds))


def histogram(rounds: Iterable[Round], draft_length: int) -> tuple[int, ...]:
    """Rounds by num_accepted, 0 to draft_length."""
    kept = Counter(round_.num_accepted for round_ in rounds)
    return tuple(kept[place] for place in range(draft_length + 1))


def acceptance_at(counts: Sequence[int]) -> tuple[float, ...]:
    """Share of rounds in which position 1, 2, ... was kept, from a `histogram`; not conditional."""
    total = sum(counts)
    return tuple(ratio(sum(counts[place:]), total) for place in range(1, len(counts)))


def hit_rate(*requests: Sequence[Round]) -> float | None:
    """Hits / rounds that wanted a successor: every round that wanted a draft, except a request's
    first. None if there were none. requests: the rounds of each."""
    wanted = [
        readiness
        for rounds in requests
        for readiness in [round_.readiness for round_ in rounds if round_.preparation is not None][
            1:
        ]
    ]
    return ratio(wanted.count("hit"), len(wanted)) if wanted else None


def tpot_s(total_s: float, ttft_s: float, num_tokens: int) -> float | None:
    """Mean seconds per token after the first; None for an answer of one token."""
    return (total_s - ttft_s) / (num_tokens - 1) if num_tokens > 1 else None


@dataclass(frozen=True)
class Overlap:
    """Metrics of overlapped drafting. Times in seconds; None if there was nothing to measure."""

    hit_rate: float | None
    hit_rate_at: tuple[float | None, ...]
    """Hit rate by the verdict's num_accepted, 0 to draft_length."""
    late: int
    """Rounds that had to wait for their successor."""
    fallbacks: dict[str, int]
    """Rounds that wanted a draft and had none, by cause."""
    t_draft_s: float | None
    """Median drafter pass."""
    t_verify_s: float | None
    """Median verification."""
    t_switch_s: float | None
    """Median time from the start of a round to its verification, over hits."""
    exposed_draft_s: float | None
    """Mean time per round that the target waited for drafts."""
    overlap_ratio: float | None
    """Time in which both ran / the smaller of their total times."""

    def to_dict(self) -> dict[str, Any]:
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in vars(self).items()
        }


def overlap(rounds: Sequence[Round], draft_length: int) -> Overlap:
    """Overlap metrics of one request's rounds, in order."""
    pairs = zip([None, *rounds], rounds, strict=False)
    asked = [(before, round_) for before, round_ in pairs if round_.preparation is not None]
    wanting = [(before, round_) for before, round_ in asked[1:] if before is not None]
    hits = [round_ for _, round_ in asked if round_.readiness == "hit"]
    behind = [
        [round_.readiness == "hit" for before, round_ in wanting if before.num_accepted == kept]
        for kept in range(draft_length + 1)
    ]
    causes = Counter(
        round_.preparation.cause for _, round_ in asked if round_.preparation is not None
    )
    passes, verifications = drafter_passes(rounds), [round_.verification for round_ in rounds]
    less = min(_length(passes), _length(verifications))
    return Overlap(
        hit_rate=hit_rate(rounds),
        hit_rate_at=tuple(ratio(sum(hit), len(hit)) if hit else None for hit in behind),
        late=sum(round_.readiness == "late" for _, round_ in asked),
        fallbacks={cause: n for cause, n in sorted(causes.items(), key=str) if cause is not None},
        t_draft_s=median(end - start for start, end in passes) if passes else None,
        t_verify_s=median(end - start for start, end in verifications) if rounds else None,
        t_switch_s=median(round_.t_draft for round_ in hits) if hits else None,
        exposed_draft_s=ratio(sum(round_.t_draft for round_ in rounds), len(rounds))
        if rounds
        else None,
        overlap_ratio=common_time(passes, verifications) / less if less else None,
    )


def drafter_passes(rounds: Sequence[Round]) -> list[Span]:
    """Passes of the draft worker, in order."""
    return sorted(
        span for round_ in rounds if round_.preparation for span in round_.preparation.passes
    )


def common_time(first: Sequence[Span], second: Sequence[Span]) -> float:
    """Seconds in which spans of both sides ran; spans of one side must not overlap each other."""
    ours, theirs = sorted(first), sorted(second)
    total, i, j = 0.0, 0, 0
    while i < len(ours) and j < len(theirs):
        a, b = ours[i], theirs[j]
        total += max(0.0, min(a[1], b[1]) - max(a[0], b[0]))
        if a[1] <= b[1]:
            i += 1
        else:
            j += 1
    return total


def _length(spans: Sequence[Span]) -> float:
    return sum(end - start for start, end in spans)
