"""Figures of a run, from its rows. What each means is told in docs/benchmarks.md, with the formulas
below.

All rates are ratios of totals: a long answer weighs more than a short one. Where papers take the
mean of each answer's own figure, that is told beside it as macro."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from d3d.lab.bench.answers import Setting
from d3d.lab.bench.rows import Round, Row


class Group(NamedTuple):
    """Rows that belong together."""

    method: str
    set_name: str
    setting: Setting

    @property
    def label(self) -> str:
        """The method, with its draft length where it has one."""
        return (
            self.method
            if self.setting.draft_length is None
            else f"{self.method} {self.setting.draft_length}"
        )


@dataclass(frozen=True)
class Speed:
    """How fast a group's answers were; times in seconds."""

    answers: int
    prompt_tokens: int
    completion_tokens: int
    tokens_per_s: float
    """All answer tokens over all the time that they took, prompts included."""
    ttft_s: float
    """Mean."""
    tpot_s: float | None
    """Seconds after first tokens over tokens after first tokens; a batch's time is shared out among
    its answers."""
    itl_s_p50: float | None
    itl_s_p99: float | None
    """Quantiles of the gaps between deliveries, as they were delivered: a round's tokens come
    together."""
    tokens_per_delivery: float
    peak_memory_bytes: int | None


@dataclass(frozen=True)
class Drafting:
    """What drafting did in a group's rounds."""

    rounds: int
    acceptance_length: float
    """Tokens that rounds committed over rounds; the first token of an answer belongs to no
    round."""
    acceptance_length_macro: float
    """Mean of the answers' own."""
    accepted_per_round: float
    """Drafted tokens kept over rounds: the acceptance length without the target's own token of each
    round."""
    acceptance_rate: float
    """Kept over really drafted tokens."""
    acceptance_at: tuple[float, ...]
    """Share of all rounds in which drafted token 1, 2, ... was kept."""
    histogram: tuple[int, ...]
    """Rounds by num_accepted, from 0."""
    t_draft_share: float | None
    t_verify_share: float | None
    """Of the time from first to last tokens; what is left of 1 is accepting, committing and text.
    None where rounds have no times."""
    t_draft_s: float | None
    t_verify_s: float | None
    """Mean of a round."""
    hit_rate: float | None = None
    """Async mode: rounds whose successor was ready / rounds that wanted one, which is all that
    wanted a draft but an answer's first."""


@dataclass(frozen=True)
class Sameness:
    """How a group's answers compare with plain decoding's."""

    compared: int
    identical: int
    rounding: int
    """Answers that part where the target was undecided."""
    other: int
    """Answers that part elsewhere: a mistake for our own methods, and to be expected of peers that
    compute otherwise."""
    by: str


class Ratio(NamedTuple):
    """How many times as fast as another method, over the prompts that both have answered."""

    answers: int
    ratio: float
    """Of totals: seconds per further token of the other over those of this one."""
    low: float
    high: float
    """95 % interval of it, from prompts drawn anew with replacement."""
    per_prompt: tuple[float, ...]
    """Each prompt's own ratio, from the smallest."""


def grouped(rows: Iterable[Row]) -> dict[Group, list[Row]]:
    groups: dict[Group, list[Row]] = {}
    for row in rows:
        groups.setdefault(Group(row.method, row.set_name, row.setting), []).append(row)
    return groups


def speed(rows: Sequence[Row]) -> Speed:
    """Zeros where nothing was answered."""
    tokens = sum(row.completion_tokens for row in rows)
    seconds = sum(row.timing.batch_s / row.timing.batch_size for row in rows)
    gaps = [
        later[0] - earlier[0]
        for row in rows
        for earlier, later in zip(row.timing.deliveries, row.timing.deliveries[1:], strict=False)
    ]
    deliveries = sum(len(row.timing.deliveries) for row in rows)
    further_s, further = further_time(rows)
    p50, p99 = (float(value) for value in np.quantile(gaps, [0.5, 0.99])) if gaps else (None, None)
    return Speed(
        answers=len(rows),
        prompt_tokens=sum(row.prompt_tokens for row in rows),
        completion_tokens=tokens,
        tokens_per_s=tokens / seconds if seconds else 0.0,
        ttft_s=sum(row.timing.ttft_s for row in rows) / len(rows) if rows else 0.0,
        tpot_s=further_s / further if further else None,
        itl_s_p50=p50,
        itl_s_p99=p99,
        tokens_per_delivery=tokens / deliveries if deliveries else 0.0,
        peak_memory_bytes=max(
            (row.peak_memory_bytes for row in rows if row.peak_memory_bytes is not None),
            default=None,
        ),
    )


def speed_within(rows: Iterable[Row], low: int, high: int) -> tuple[float, int]:
    """Seconds and tokens of the deliveries that began with answer token number `low` (from 1) up to
    `high` - 1, the first delivery left out: how fast answers grow once they have come so far."""
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
    """Seconds after the first token, each answer's share of its batch's, and the tokens that came
    in them."""
    timed = [row for row in rows if row.timing.tpot_s is not None]
    seconds = sum((row.timing.batch_s - row.timing.ttft_s) / row.timing.batch_size for row in timed)
    return seconds, sum(row.completion_tokens - 1 for row in timed)


def drafting(rows: Iterable[Row]) -> Drafting | None:
    """None for methods without rounds of ours; zeros where there was no round."""
    with_rounds = [row for row in rows if row.acceptance is not None]
    if not with_rounds:
        return None
    rounds = [one for row in with_rounds for one in _rounds(row)]
    own = [
        row.acceptance.acceptance_length
        for row in with_rounds
        if row.acceptance is not None and row.acceptance.rounds
    ]
    width = max((one.draft_length for one in rounds), default=0)
    histogram = tuple(sum(one.num_accepted == kept for one in rounds) for kept in range(width + 1))
    drafted = sum(one.draft_length for one in rounds)
    t_draft, t_verify = sum(one.t_draft for one in rounds), sum(one.t_verify for one in rounds)
    # rounds of a batch are the same for all its answers, so is the time that they are a share of
    seconds = sum(row.timing.total_s - row.timing.ttft_s for row in with_rounds)
    has_times = t_verify > 0 and seconds > 0
    count = len(rounds)
    wanted = [readiness for row in with_rounds for readiness in _wanted_successors(row)]
    return Drafting(
        rounds=count,
        acceptance_length=sum(one.num_committed for one in rounds) / count if count else 0.0,
        acceptance_length_macro=sum(own) / len(own) if own else 0.0,
        accepted_per_round=sum(one.num_accepted for one in rounds) / count if count else 0.0,
        acceptance_rate=sum(one.num_accepted for one in rounds) / drafted if drafted else 0.0,
        acceptance_at=tuple(sum(histogram[place:]) / count for place in range(1, width + 1))
        if count
        else (),
        histogram=histogram,
        t_draft_share=t_draft / seconds if has_times else None,
        t_verify_share=t_verify / seconds if has_times else None,
        t_draft_s=t_draft / count if has_times else None,
        t_verify_s=t_verify / count if has_times else None,
        hit_rate=wanted.count("hit") / len(wanted) if wanted else None,
    )


def _rounds(row: Row) -> list[Round]:
    return [] if row.acceptance is None else row.acceptance.each_round


def _wanted_successors(row: Row) -> list[str]:
    """Readiness of the successors that an answer's rounds wanted; its first draft is no
    successor."""
    return [one.readiness for one in _rounds(row) if one.readiness is not None][1:]


def sameness(rows: Iterable[Row]) -> Sameness | None:
    """None where nothing was compared."""
    found = [row.identity for row in rows if row.identity is not None]
    if not found:
        return None
    identical = sum(one.identical for one in found)
    rounding = sum(one.is_rounding for one in found)
    return Sameness(
        len(found),
        identical,
        rounding,
        len(found) - identical - rounding,
        "+".join(sorted({one.by for one in found})),
    )


def score_share(rows: Iterable[Row]) -> tuple[int, int]:
    """Right answers, and answers that could be scored."""
    scores = [row.score for row in rows if row.score is not None]
    return sum(scores), len(scores)


def speed_up(
    rows: Sequence[Row], baseline: Sequence[Row], *, draws: int = 2000, seed: int = 0
) -> Ratio | None:
    """How many times as fast `rows` are as `baseline`; None where no prompt has an answer of two
    tokens or more in both.

    Prompts are paired, and so they are drawn: what makes a prompt slow for both cancels out.
    """
    others = {_prompt(row): row for row in baseline}
    pairs = [(row, others[_prompt(row)]) for row in rows if _prompt(row) in others]
    timed = [pair for pair in pairs if all(row.timing.tpot_s is not None for row in pair)]
    if not timed:
        return None
    # columns: seconds and tokens of this one, seconds and tokens of the other
    table = np.array([[*further_time([row]), *further_time([other])] for row, other in timed])
    drawn = np.random.default_rng(seed).integers(len(table), size=(draws, len(table)))
    sums = table[drawn].sum(axis=1)
    low, high = np.quantile(_ratios(sums), [0.025, 0.975])
    per_prompt = tuple(sorted(float(value) for value in _ratios(table)))
    return Ratio(
        len(timed), float(_ratios(table.sum(axis=0)[None])[0]), float(low), float(high), per_prompt
    )


def _ratios(table: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Of rows of seconds and tokens of the one and of the other."""
    own, other = table[:, 0] / table[:, 1], table[:, 2] / table[:, 3]
    return np.divide(other, own)


def _prompt(row: Row) -> tuple[str, str, int]:
    return (row.set_name, row.prompt_id, row.turn)
