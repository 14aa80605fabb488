"""Recorded traffic: a line for each request, with what it asked for and what drafting did. It stays
on this machine, and is recorded only on request.

Any number of programs may record into the same file; torn lines are skipped when it is read."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast

from pydantic import BaseModel, ConfigDict, ValidationError

from d3d.engine.params import SamplingParams
from d3d.errors import D3DError, InvalidRequest
from d3d.files import FileKind, Journal
from d3d.inputs import json_or_none, refuse_packed

if TYPE_CHECKING:
    from d3d.api import Messages, Model, SpeculationOptions
    from d3d.results import GenerationResult

FORMAT: Literal[1] = 1
PERMISSIONS = 0o600
"""Permissions of a new file: requests are private."""


class Record(BaseModel):
    """One request. A round is (draft_length, num_accepted, num_committed)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    traffic: Literal[1] = FORMAT
    date: str
    kind: Literal["raw", "chat", "later turn"]
    """Raw text, the first turn of a conversation, or one of its later turns."""
    prompt_sha256: str
    """Hash of the token ids."""
    prompt_tokens: int
    completion_tokens: int
    finish_reason: str
    sampling: dict[str, Any]
    """Parameters other than their defaults; of stops only their number."""
    mode: str
    options: dict[str, Any] = {}
    """Options of the mode, as resolved; missing ones had their defaults."""
    target: str
    """Fingerprint of its weights."""
    drafter: str | None = None
    """Fingerprint of its weights and its configuration; None in plain mode."""
    quantize: str | None = None
    """Weight quantization, such as "int8"; None if there is none."""
    ms_per_token: float | None = None
    rounds: tuple[tuple[int, int, int], ...] = ()
    thinking: bool | None = None
    messages: list[dict[str, str]] | None = None
    """Only if text was to be recorded; the same holds for `text`."""
    text: str | None = None

    @property
    def committed(self) -> int:
        return sum(committed for _, _, committed in self.rounds)


class Asked(NamedTuple):
    """A request as it was asked."""

    prompt: str | Messages
    options: Mapping[str, Any]
    """`method` and its options."""
    sampling: dict[str, Any]
    raw: bool = False

    @property
    def messages(self) -> Messages:
        if isinstance(self.prompt, str):
            return [{"role": "user", "content": self.prompt}]
        return self.prompt

    @property
    def kind(self) -> Literal["raw", "chat", "later turn"]:
        if self.raw:
            return "raw"
        turns = sum(message["role"] == "user" for message in self.messages)
        return "chat" if turns < 2 else "later turn"


TRAFFIC = FileKind("a record of requests", ("traffic",))


def traffic_journal(path: Path) -> Journal:
    return Journal(path, TRAFFIC, shared=True, permissions=PERMISSIONS)


@dataclass(frozen=True)
class TrafficLog:
    """Records requests in a file."""

    path: Path
    with_text: bool = False

    def add(self, model: Model, request: Asked, result: GenerationResult) -> str | None:
        """Record an answered request. Returns a warning if that fails; an answer never does."""
        try:
            record = self._record(model, request, result)
            traffic_journal(self.path).append(record.model_dump_json(exclude_none=True))
        except (OSError, ValueError, D3DError) as error:
            return f"the request was not recorded in {self.path}: {' '.join(str(error).split())}"
        return None

    def _record(self, model: Model, request: Asked, result: GenerationResult) -> Record:
        speculation, prompt = result.speculation, request.prompt
        mode = "plain" if speculation is None else speculation.mode
        config = model.config(**cast("SpeculationOptions", request.options))
        options = config.model_dump(exclude={"method"}, exclude_none=True)
        if speculation is not None:
            options["draft_length"] = speculation.draft_length
        text: dict[str, Any] = {}
        if self.with_text:
            text = {"text": prompt} if request.raw else {"messages": request.messages}
        token_ids = model.encode(prompt, raw=request.raw, thinking=result.thinking)
        return Record(
            date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            kind=request.kind,
            prompt_sha256=ids_sha256(token_ids),
            prompt_tokens=result.usage.prompt_tokens,
            completion_tokens=result.usage.completion_tokens,
            finish_reason=result.finish_reason,
            sampling=_without_texts(request.sampling),
            mode=mode,
            options=options,
            target=model.target.fingerprint,
            drafter=None if speculation is None else model.drafter_fingerprint,
            quantize=result.quantize,
            ms_per_token=None if result.timing.tpot_s is None else 1000 * result.timing.tpot_s,
            rounds=tuple(
                (round_.draft_length, round_.num_accepted, round_.num_committed)
                for round_ in result.rounds
            ),
            thinking=result.thinking,
            **text,
        )


def read_traffic(path: Path) -> tuple[list[Record], int]:
    """Records, and the number of damaged lines. Raises InvalidRequest if there is no record."""
    refuse_packed(path)
    try:
        lines = path.read_text(encoding="utf-8-sig", errors="replace").split("\n")
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
            f"{path} holds no recorded request; d3d generate and d3d chat write them with "
            f"--record {path}"
        )
    return records, damaged


def is_traffic(path: Path) -> bool:
    """True if the first line of a file is a recorded request, possibly a damaged one."""
    try:
        with path.open(encoding="utf-8-sig") as file:
            first = json_or_none(next((line for line in file if line.strip()), "{}"))
    except (OSError, UnicodeDecodeError):
        return False
    return isinstance(first, dict) and "traffic" in first


def ids_sha256(token_ids: Sequence[int]) -> str:
    return hashlib.sha256(" ".join(map(str, token_ids)).encode()).hexdigest()


def _without_texts(sampling: dict[str, Any]) -> dict[str, Any]:
    """Stop strings could reveal the request, so only their number is kept."""
    given = SamplingParams(**sampling).model_dump(mode="json", exclude_defaults=True)
    return {name: len(value) if name == "stop" else value for name, value in given.items()}
