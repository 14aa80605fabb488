"""The file of results: one JSON object a line, one line an answer. A run that was killed goes on
behind the last whole line."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from d3d.errors import InvalidRequest
from d3d.lab.bench.answers import Setting

ROWS_FILE = "results.jsonl"


class Round(NamedTuple):
    """One round, as `d3d.core.types.RoundStats` has it; times in seconds, 0 where they are not
    known."""

    draft_length: int
    num_accepted: int
    num_committed: int
    t_draft: float
    t_verify: float
    readiness: str | None = None
    """Async mode: hit, late, miss or unprepared, as `d3d.core.types.Readiness` has it; None
    elsewhere."""
    looked_up: bool = False
    num_slots: int | None = None
    """None where it was not recorded."""
    fitted: bool | None = None
    """As `d3d.core.types.Preparation` has it."""


class Timing(BaseModel):
    """Seconds of one answer, as it was delivered."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    ttft_s: float
    total_s: float
    tpot_s: float | None
    """None for an answer of one token, or one that came in one piece."""
    batch_s: float
    """Until all answers of its batch were done; with `batch_size` answers in it, this one's share
    is batch_s / batch_size."""
    batch_size: int
    deliveries: list[tuple[float, int]]
    """(seconds from the request, tokens that came together)."""


class Acceptance(BaseModel):
    """What drafting did for one answer."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    rounds: int
    acceptance_length: float
    acceptance_rate: float
    each_round: list[Round]


class Identity(BaseModel):
    """How an answer compares with plain decoding's of the same prompt."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    identical: bool
    by: str
    """ids, or text where a peer tells nothing else; position then counts characters."""
    plain_tokens: int
    position: int | None = None
    """Where the two part, from 0."""
    gap: float | None = None
    """How far the target was from choosing the one or the other there; None where that was not
    looked at, or one of them ends."""
    is_rounding: bool = False


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
    timing: Timing
    acceptance: Acceptance | None
    identity: Identity | None
    """None for plain itself."""
    peak_memory_bytes: int | None
    repeats: bool
    """Whether the answer ends in a loop."""
    score: bool | None
    warnings: list[str]
    text: str
    token_ids: list[int] | None
    modelled: bool = False
    """Whether its times were modelled instead of measured."""

    @property
    def key(self) -> tuple[Any, ...]:
        return row_key(self.method, self.setting, self.set_name, self.prompt_id, self.turn)


def row_key(
    method: str, setting: Setting, set_name: str, prompt_id: str, turn: int
) -> tuple[Any, ...]:
    """What there is one row of."""
    return (
        method,
        setting.max_tokens,
        setting.batch,
        setting.draft_length,
        set_name,
        prompt_id,
        turn,
    )


def read_rows(path: Path) -> list[Row]:
    """All whole rows of a file; a torn last line is left out. Raises InvalidRequest for another
    line that is no row."""
    if not path.is_file():
        return []
    content = path.read_bytes()
    lines = content[: content.rfind(b"\n") + 1].splitlines()
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            rows.append(Row.model_validate_json(line))
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"])) or "the line"
            raise InvalidRequest(
                f"{path}, line {number}: not a row of results ({where}: {first['msg']}); mend or remove it"
            ) from error
    return rows


class RowWriter:
    """Appends rows, each of them whole and in the file before the next one is measured."""

    def __init__(self, path: Path) -> None:
        self.path = path
        _cut_torn_line(path)

    def append(self, rows: Iterable[Row]) -> None:
        with self.path.open("ab") as file:
            for row in rows:
                file.write(
                    json.dumps(
                        row.model_dump(mode="json", by_alias=True), ensure_ascii=False
                    ).encode()
                    + b"\n"
                )


def _cut_torn_line(path: Path) -> None:
    if not path.is_file():
        return
    with path.open("r+b") as file:
        content = file.read()
        file.truncate(content.rfind(b"\n") + 1)
