"""Recorded traffic: a line for each request, of what it asked and what drafting did, on this
machine only and only if asked for.

A line goes to the file in one write behind its end, so any number of programs may record into the
same file; a line that a full disk or a kill has torn is passed over when the file is read."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, ValidationError

from d3d.core.types import SamplingParams
from d3d.errors import InvalidRequest

if TYPE_CHECKING:
    from d3d.api import Messages, Model
    from d3d.decoding.modes import ModeOptions
    from d3d.results import GenerationResult

FORMAT: Literal[1] = 1
OWN_MODE = 0o600
"""Of a new file: what people ask is nobody else's business."""


class Record(BaseModel):
    """One request. A round is (drafted, kept, committed)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    traffic: Literal[1] = FORMAT
    date: str
    kind: Literal["raw", "chat", "later turn"]
    """Text as it is, a conversation's first turn, or one of its later turns."""
    prompt_sha256: str
    """Of the token ids."""
    prompt_tokens: int
    completion_tokens: int
    finish_reason: str
    sampling: dict[str, Any]
    """What is not its default; stops are counted, not told."""
    mode: str
    options: dict[str, Any] = {}
    """Of the mode, by name, as they came to be; what is missing had its default."""
    target: str
    """Fingerprint of its weights."""
    drafter: str | None = None
    """Fingerprint of its weights and its configuration; None in plain mode."""
    quantize: str | None = None
    """What the weights were rounded to; None: nothing."""
    ms_per_token: float | None = None
    rounds: tuple[tuple[int, int, int], ...] = ()
    thinking: bool | None = None
    messages: list[dict[str, str]] | None = None
    """Only where the text was to be recorded, as `text`."""
    text: str | None = None

    @property
    def committed(self) -> int:
        return sum(committed for _, _, committed in self.rounds)


class Asked(NamedTuple):
    """A request, as it was asked."""

    prompt: str | Messages
    options: ModeOptions
    sampling: dict[str, Any]
    raw: bool = False

    @property
    def messages(self) -> Messages:
        return (
            [{"role": "user", "content": self.prompt}]
            if isinstance(self.prompt, str)
            else self.prompt
        )


@dataclass(frozen=True)
class TrafficLog:
    """Where requests are recorded."""

    path: Path
    with_text: bool = False

    def add(self, model: Model, asked: Asked, result: GenerationResult) -> str | None:
        """Record a request that has been answered. Returns why it could not be, for a warning: an
        answer never fails for it."""
        try:
            append_line(
                self.path, self._record(model, asked, result).model_dump_json(exclude_none=True)
            )
        except (OSError, ValueError) as error:
            return f"the request was not recorded in {self.path}: {' '.join(str(error).split())}"
        return None

    def _record(self, model: Model, asked: Asked, result: GenerationResult) -> Record:
        speculation, messages = result.speculation, asked.messages
        mode = "plain" if speculation is None else speculation.mode
        options = {
            name: value
            for name, value in model.options(mode, asked.options)._asdict().items()
            if value is not None
        }
        text: dict[str, Any] = {"text": asked.prompt} if asked.raw else {"messages": messages}
        return Record(
            date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            kind="raw"
            if asked.raw
            else "chat"
            if sum(message["role"] == "user" for message in messages) < 2
            else "later turn",
            prompt_sha256=ids_sha256(
                model.encode(asked.prompt, raw=asked.raw, thinking=result.thinking)
            ),
            prompt_tokens=result.usage.prompt_tokens,
            completion_tokens=result.usage.completion_tokens,
            finish_reason=result.finish_reason,
            sampling=_told(asked.sampling),
            mode=mode,
            options=options
            if speculation is None
            else options | {"draft_length": speculation.draft_length},
            target=model.target.fingerprint,
            drafter=None if speculation is None else model.drafter_fingerprint,
            quantize=result.quantize,
            ms_per_token=None if result.timing.tpot_s is None else 1000 * result.timing.tpot_s,
            rounds=tuple(
                (stats.draft_length, stats.num_accepted, stats.num_committed)
                for stats in result.rounds
            ),
            thinking=result.thinking,
            **(text if self.with_text else {}),
        )


def append_line(path: Path, line: str) -> None:
    """Add a line in one write behind the file's end; a torn line before it is ended first. Raises
    OSError."""
    file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, OWN_MODE)
    try:
        end = os.lseek(file, 0, os.SEEK_END)
        if end:
            os.lseek(file, end - 1, os.SEEK_SET)
        torn = bool(end) and os.read(file, 1) != b"\n"
        content = f"{'' if not torn else chr(10)}{line}\n".encode()
        if os.write(file, content) < len(content):
            raise OSError("the disk is full")
    finally:
        os.close(file)


def read_traffic(path: Path) -> tuple[list[Record], int]:
    """Records, and how many lines were passed over as damaged. Raises InvalidRequest where there is
    no record."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    except OSError as error:
        raise InvalidRequest(
            f"{path} can't be read ({error.strerror}); give a file that --record has written"
        ) from error
    records, damaged = [], 0
    for line in filter(str.strip, lines):
        try:
            records.append(Record.model_validate_json(line))
        except ValidationError:
            damaged += 1
    if not records:
        raise InvalidRequest(
            f"{path} holds no recorded request; d3d generate and d3d chat write them with --record {path}"
        )
    return records, damaged


def is_traffic(path: Path) -> bool:
    """Whether the first line of a file is a recorded request, or was meant to be one."""
    try:
        with path.open(encoding="utf-8") as file:
            first = json.loads(next((line for line in file if line.strip()), "{}"))
    except (OSError, ValueError):
        return False
    return isinstance(first, dict) and "traffic" in first


def ids_sha256(token_ids: Sequence[int]) -> str:
    return hashlib.sha256(" ".join(map(str, token_ids)).encode()).hexdigest()


def _told(sampling: dict[str, Any]) -> dict[str, Any]:
    """Without texts, which may give away what was asked."""
    given = SamplingParams(**sampling).model_dump(mode="json", exclude_defaults=True)
    return {name: len(value) if name == "stop" else value for name, value in given.items()}
