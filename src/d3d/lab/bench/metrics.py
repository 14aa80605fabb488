"""Figures of a run, from its rows; docs/benchmarks.md defines them.

Rates are ratios of totals, so a long answer weighs more than a short one. `macro` is the mean of
the answers' own figures, as some papers report it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import mean
from typing import NamedTuple

import numpy as np

from d3d.engine import metrics
from d3d.engine.metrics import ratio
from d3d.lab.bench.answers import Setting
from d3d.lab.bench.rows import Row
from d3d.lab.stats import Interval, paired_ratio


class RowGroup(NamedTuple):
    """Rows of one method, set and setting are reported together."""

    method: str
    set_name: str
    setting: Setting

    @property
    def label(self) -> str:
        """The method and its draft length, if it has one."""
        length = self.setting.draft_length
        return self.method if length is None else f"{self.method} {length}"


@dataclass(frozen=True)
class Speed:
    """Speed of a group's answers; times in seconds."""

    answers: int
    completion_tokens: int
    tokens_per_s: float
    """All answer tokens / all their time, prompts included."""
    ttft_s: float
    """Mean."""
    tpot_s: float | None
    """Time after first tokens / tokens after first tokens; the time of a batch is divided among its
    answers."""
    itl_s_p50: float | None
    itl_s_p99: float | None
    """Quantiles of the gaps between deliveries; the tokens of a round arrive together."""
    tokens_per_delivery: float
    peak_memory_bytes: int | None


@dataclass(frozen=True)
class RoundFigures:
    """Figures of a group's rounds."""

    rounds: int
    acceptance_length: float
    acceptance_length_macro: float
    accepted_per_round: float
    acceptance_rate: float
    acceptance_at: tuple[float, ...]
    histogram: tuple[int, ...]
    """Rounds by num_accepted, from 0."""
    t_draft_share: float | None
    t_verify_share: float | None
    """Share of the time from first to last token; the rest is acceptance, commits and text. None if
    rounds have no times."""
    t_draft_s: float | None
    t_verify_s: float | None
    """Mean per round."""
    hit_rate: float | None = None
    """Async mode only."""


class IdentityCounts(NamedTuple):
    """A group's answers compared with plain decoding's."""

    compared: int
    identical: int
    rounding: int
    """Answers that differ first at a near-tie."""
    other: int
    """Answers that differ first elsewhere: a bug in our own methods, expected of peers whose
    arithmetic differs."""
    by: str
    repeats: int
    """Answers that end in a loop."""


class SpeedUp(NamedTuple):
    """Speed relative to another method, over the prompts that both have answered."""

    answers: int
    interval: Interval
    """The other's tpot_s / this one's, both ratios of totals."""
    per_prompt: tuple[float, ...]
    """Each prompt's own ratio, ascending."""


def grouped(rows: Iterable[Row]) -> dict[RowGroup, list[Row]]:
    """Failed answers are left out."""
    groups: dict[RowGroup, list[Row]] = {}
    for row in rows:
        if row.error is None:
            groups.setdefault(group_of(row), []).append(row)
    return groups


def group_of(row: Row) -> RowGroup:
    return RowGroup(row.method, row.set_name, row.setting)


def speed(rows: Sequence[Row]) -> Speed:
    """Zeros if there are no rows."""
    tokens = sum(row.completion_tokens for row in rows)
    steps = [pair for row in rows for pair in pairwise(row.timing.deliveries)]
    gaps = [later - earlier for (earlier, _), (later, _) in steps]
    p50, p99 = (float(value) for value in np.quantile(gaps, [0.5, 0.99])) if gaps else (None, None)
    memory = [row.peak_memory_bytes for row in rows if row.peak_memory_bytes is not None]
    further_s, further = further_time(rows)
    return Speed(
        answers=len(rows),
        completion_tokens=tokens,
        tokens_per_s=ratio(tokens, sum(row.timing.batch_s / row.timing.batch_size for row in rows)),
        ttft_s=ratio(sum(row.timing.ttft_s for row in rows), len(rows)),
        tpot_s=further_s / further if further else None,
        itl_s_p50=p50,
        itl_s_p99=p99,
        tokens_per_delivery=ratio(tokens, sum(len(row.timing.deliveries) for row in rows)),
        peak_memory_bytes=max(memory, default=None),
    )


def speed_within(rows: Iterable[Row], low: int, high: int) -> tuple[float, int]:
    """Seconds and tokens of the deliveries that came when `low` to `high` - 1 answer tokens were
    there; the first delivery is left out."""
    seconds, tokens = 0.0, 0
    for row in rows:
        written = row.timing.deliveries[0][1] if row.timing.deliveries else 0
        for (before, _), (at_s, count) in pairwise(row.timing.deliveries):
            if low <= written < high:
                seconds += (at_s - before) / row.timing.batch_size
                tokens += count
            written += count
    return seconds, tokens


def further_time(rows: Iterable[Row]) -> tuple[float, int]:
    """Seconds after the first token, each answer's share of its batch, and the tokens in them."""
    timed = [row for row in rows if row.timing.tpot_s is not None]
    seconds = sum((row.timing.batch_s - row.timing.ttft_s) / row.timing.batch_size for row in timed)
    return seconds, sum(row.completion_tokens - 1 for row in timed)


def round_figures(rows: Iterable[Row]) -> RoundFigures | None:
    """None for methods that run no rounds of ours; zeros if there was no round."""
    with_rounds = [row for row in rows if row.acceptance is not None]
    if not with_rounds:
        return None
    rounds = [round_ for row in with_rounds for round_ in row.rounds]
    histogram = metrics.histogram(rounds, max((r.draft_length for r in rounds), default=0))
    t_draft, t_verify = sum(r.t_draft for r in rounds), sum(r.t_verify for r in rounds)
    # the rounds of a batch count for each of its answers, and so does their time
    seconds = sum(row.timing.total_s - row.timing.ttft_s for row in with_rounds)
    has_times = t_verify > 0 and seconds > 0
    lengths = [metrics.acceptance_length(row.rounds) for row in with_rounds if row.rounds]
    return RoundFigures(
        rounds=len(rounds),
        acceptance_length=metrics.acceptance_length(rounds),
        acceptance_length_macro=mean(lengths) if lengths else 0.0,
        accepted_per_round=metrics.accepted_per_round(rounds),
        acceptance_rate=metrics.acceptance_rate(rounds),
        acceptance_at=metrics.acceptance_at(histogram),
        histogram=histogram,
        t_draft_share=t_draft / seconds if has_times else None,
        t_verify_share=t_verify / seconds if has_times else None,
        t_draft_s=t_draft / len(rounds) if has_times else None,
        t_verify_s=t_verify / len(rounds) if has_times else None,
        hit_rate=metrics.hit_rate(*(row.rounds for row in with_rounds)),
    )


def identity_counts(rows: Sequence[Row]) -> IdentityCounts | None:
    """None if nothing was compared."""
    found = [row.identity for row in rows if row.identity is not None]
    if not found:
        return None
    identical = sum(identity.identical for identity in found)
    rounding = sum(identity.is_rounding for identity in found)
    other = len(found) - identical - rounding
    by = "+".join(sorted({identity.by for identity in found}))
    repeats = sum(row.repeats for row in rows)
    return IdentityCounts(len(found), identical, rounding, other, by, repeats)


def score_counts(rows: Iterable[Row]) -> tuple[int, int]:
    """Right answers, and answers that could be scored."""
    scores = [row.score for row in rows if row.score is not None]
    return sum(scores), len(scores)


def speed_up(rows: Sequence[Row], baseline: Sequence[Row]) -> SpeedUp | None:
    """Speed-up of `rows` over `baseline`; None if no prompt has an answer of two tokens or more in
    both."""
    others = {row.prompt_key: row for row in baseline}
    pairs = [(row, others[row.prompt_key]) for row in rows if row.prompt_key in others]
    timed = [pair for pair in pairs if all(row.timing.tpot_s is not None for row in pair)]
    if not timed:
        return None
    own = [further_time([row]) for row, _ in timed]
    other = [further_time([row]) for _, row in timed]
    each = [
        (theirs_s / theirs) / (ours_s / ours)
        for (ours_s, ours), (theirs_s, theirs) in zip(own, other, strict=True)
    ]
    return SpeedUp(len(timed), paired_ratio(own, other), tuple(sorted(each)))
