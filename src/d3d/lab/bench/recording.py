"""From an answer to its row."""

from __future__ import annotations

from dataclasses import dataclass

from d3d.core.types import RoundStats
from d3d.lab.bench.answers import Answer, Question, Setting
from d3d.lab.bench.identity import ends_in_a_loop
from d3d.lab.bench.prompt_sets import Prompt
from d3d.lab.bench.rows import Acceptance, Identity, Round, Row, Timing
from d3d.lab.bench.scorers import score

DIGITS = 6
"""Of seconds in the file: microseconds."""


@dataclass(frozen=True)
class Measured:
    """An answer, and what it answers."""

    method: str
    setting: Setting
    prompt: Prompt
    turn: int
    question: Question
    answer: Answer
    peak_memory_bytes: int
    batch_size: int
    """Questions that were answered together; fewer than the setting's batch where a set's prompts
    run out."""


def make_row(measured: Measured, identity: Identity | None, *, run_code: bool = False) -> Row:
    """Only an answer to a conversation's last turn is scored, for that is what a reference belongs
    to."""
    answer, prompt = measured.answer, measured.prompt
    is_last = measured.turn == prompt.num_turns - 1
    return Row(
        method=measured.method,
        set_name=prompt.set_name,
        prompt_id=prompt.prompt_id,
        turn=measured.turn,
        setting=measured.setting,
        prompt_tokens=len(measured.question.token_ids),
        completion_tokens=answer.num_tokens,
        finish_reason=answer.finish_reason,
        timing=timing(answer, measured.batch_size),
        acceptance=acceptance(answer),
        identity=identity,
        peak_memory_bytes=measured.peak_memory_bytes,
        repeats=ends_in_a_loop(
            answer.token_ids if answer.token_ids is not None else answer.text.split()
        ),
        score=score(answer.text, prompt.reference, run_code=run_code) if is_last else None,
        warnings=list(answer.warnings),
        text=answer.text,
        token_ids=None if answer.token_ids is None else list(answer.token_ids),
        modelled=answer.modelled,
    )


def timing(answer: Answer, batch_size: int) -> Timing:
    """All zeros for an answer without a token."""
    deliveries = [
        (round(delivery.at_s, DIGITS), delivery.num_tokens) for delivery in answer.deliveries
    ]
    first, last = (deliveries[0][0], deliveries[-1][0]) if deliveries else (0.0, 0.0)
    tpot = (
        round((last - first) / (answer.num_tokens - 1), DIGITS + 3) if len(deliveries) > 1 else None
    )
    return Timing(
        ttft_s=first,
        total_s=last,
        tpot_s=tpot,
        batch_s=round(answer.wall_s, DIGITS),
        batch_size=batch_size,
        deliveries=deliveries,
    )


def acceptance(answer: Answer) -> Acceptance | None:
    """Zeros where there was no round."""
    if answer.rounds is None:
        return None
    rounds = answer.rounds
    drafted = sum(stats.draft_length for stats in rounds)
    return Acceptance(
        rounds=len(rounds),
        acceptance_length=round(sum(stats.num_committed for stats in rounds) / len(rounds), DIGITS)
        if rounds
        else 0.0,
        acceptance_rate=round(sum(stats.num_accepted for stats in rounds) / drafted, DIGITS)
        if drafted
        else 0.0,
        each_round=[_round(stats) for stats in rounds],
    )


def _round(stats: RoundStats) -> Round:
    readiness, fitted = (
        (None, None)
        if (prepared := stats.preparation) is None
        else (prepared.readiness, prepared.fitted)
    )
    times = round(stats.t_draft, DIGITS), round(stats.t_verify, DIGITS)
    return Round(*stats[:3], *times, readiness, stats.looked_up, stats.num_slots, fitted)
