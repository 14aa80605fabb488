"""The results file: one JSON object per line, one line per answer. A killed run resumes after the
last whole line."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, PlainSerializer, PlainValidator, ValidationError

from d3d.engine import metrics
from d3d.engine.round import Round
from d3d.errors import InvalidRequest, first_problem
from d3d.files import FileKind, Journal
from d3d.json_text import to_json
from d3d.lab.bench.answers import Setting, TimedAnswer

ROWS_FILE = "results.jsonl"
DIGITS = 6
"""Digits of seconds in the file."""

LONGEST_LOOP = 32
"""Tokens of the longest loop to look for."""
REPEATED_TOKENS = 24
REPEATED_TIMES = 4
"""A repetition at the end counts as a loop if it covers REPEATED_TOKENS and REPEATED_TIMES
periods."""

RowRound = Annotated[Round, PlainValidator(Round.from_json), PlainSerializer(Round.to_json)]


class RowTiming(BaseModel):
    """Delivery times of an answer, in seconds."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    ttft_s: float
    total_s: float
    tpot_s: float | None
    """None for an answer of one token or one delivery."""
    batch_s: float
    """Until the whole batch was done; an answer's share is batch_s / batch_size."""
    batch_size: int
    deliveries: list[tuple[float, int]]
    """(seconds from the request, number of tokens)."""


class RowAcceptance(BaseModel):
    """Rounds of an answer."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    rounds: int
    acceptance_length: float
    acceptance_rate: float
    each_round: list[RowRound]


class Identity(BaseModel):
    """An answer compared with the plain answer to the same prompt."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    identical: bool
    by: str
    """`ids`; or `text` for peers that report no ids, and `position` counts characters then."""
    plain_tokens: int
    position: int | None = None
    """First difference, from 0."""
    gap: float | None = None
    """Distance of the target's choice there; None if unknown, or if one answer ends there."""
    is_rounding: bool = False


class RowKey(NamedTuple):
    """Identifies a row within a run."""

    method: str
    setting: Setting
    set_name: str
    prompt_id: str
    turn: int


class Row(BaseModel):
    """One answer."""

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)

    method: str
    set_name: str = Field(alias="set")
    prompt_id: str
    turn: int
    setting: Setting
    prompt_tokens: int
    completion_tokens: int
    finish_reason: str
    timing: RowTiming
    acceptance: RowAcceptance | None
    identity: Identity | None
    """None for plain itself."""
    peak_memory_bytes: int | None
    repeats: bool
    """True if the answer ends in a loop."""
    score: bool | None
    warnings: list[str]
    text: str
    token_ids: list[int] | None
    modelled: bool = False
    """True if its times are modelled, not measured."""
    error: str | None = None
    """Reason why the answer is not whole; such a row is in no figure."""

    @property
    def key(self) -> RowKey:
        return RowKey(self.method, self.setting, self.set_name, self.prompt_id, self.turn)

    @property
    def prompt_key(self) -> tuple[str, str, int]:
        """Identifies what was asked: set, prompt and turn."""
        return self.set_name, self.prompt_id, self.turn

    @property
    def rounds(self) -> list[Round]:
        return [] if self.acceptance is None else self.acceptance.each_round


ROWS = FileKind("a list of benchmark results", ("method", "set", "prompt_id"))


def read_rows(path: Path) -> list[Row]:
    """All whole rows of a file; none if it is missing. Raises InvalidRequest for an invalid row."""
    rows = []
    for number, line in Journal(path, ROWS).lines():
        try:
            rows.append(Row.model_validate_json(line))
        except ValidationError as error:
            known = [field.alias or name for name, field in Row.model_fields.items()]
            problem = first_problem(error, known)
            raise InvalidRequest(
                f"{path}, line {number}: not a row of results ({problem}); fix or remove it"
            ) from error
    return rows


def append_rows(path: Path, rows: Iterable[Row]) -> None:
    """Add rows to a file; a torn last line is removed."""
    records = (row.model_dump(mode="json", by_alias=True) for row in rows)
    Journal(path, ROWS).append(*(to_json(record, ensure_ascii=False) for record in records))


def answer_fields(answer: TimedAnswer, batch_size: int) -> dict[str, Any]:
    """Fields of a row that hold an answer. batch_size: questions that were answered together."""
    ids = answer.token_ids
    return {
        "completion_tokens": answer.num_tokens,
        "finish_reason": answer.finish_reason,
        "timing": _timing(answer, batch_size),
        "acceptance": None if answer.rounds is None else acceptance_of(answer.rounds),
        "repeats": ends_in_a_loop(answer.text.split() if ids is None else ids),
        "warnings": list(answer.warnings),
        "text": answer.text,
        "token_ids": None if ids is None else list(ids),
        "modelled": answer.modelled,
        "error": answer.error,
    }


def _timing(answer: TimedAnswer, batch_size: int) -> RowTiming:
    """All zeros for an answer without a token."""
    deliveries = [(round(at_s, DIGITS), num_tokens) for at_s, num_tokens in answer.deliveries]
    first, last = (deliveries[0][0], deliveries[-1][0]) if deliveries else (0.0, 0.0)
    tpot = metrics.tpot_s(last, first, answer.num_tokens) if len(deliveries) > 1 else None
    return RowTiming(
        ttft_s=first,
        total_s=last,
        tpot_s=None if tpot is None else round(tpot, DIGITS + 3),
        batch_s=round(answer.wall_s, DIGITS),
        batch_size=batch_size,
        deliveries=deliveries,
    )


def acceptance_of(rounds: Iterable[Round]) -> RowAcceptance:
    """Rounds with their figures; zeros if there is no round."""
    rounds = [
        round_._replace(
            t_draft=round(round_.t_draft, DIGITS), t_verify=round(round_.t_verify, DIGITS)
        )
        for round_ in rounds
    ]
    return RowAcceptance(
        rounds=len(rounds),
        acceptance_length=round(metrics.acceptance_length(rounds), DIGITS),
        acceptance_rate=round(metrics.acceptance_rate(rounds), DIGITS),
        each_round=rounds,
    )


def ends_in_a_loop(token_ids: Sequence[object]) -> bool:
    """True if an answer (ids or words) ends by repeating the same few tokens. Speed on such text is
    meaningless."""
    for period in range(1, LONGEST_LOOP + 1):
        length = period
        while length < len(token_ids) and token_ids[-length - 1] == token_ids[period - length - 1]:
            length += 1
        if length >= max(REPEATED_TOKENS, REPEATED_TIMES * period):
            return True
    return False
