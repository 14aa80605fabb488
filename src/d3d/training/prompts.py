"""Training prompts: JSON lines of many shapes become chat prompts in token ids.

A line that is no JSON object stops everything, by its number; a row without a usable prompt is left out and counted.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from d3d.core.errors import InvalidRequest
from d3d.models.chat import encode_chat

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

TEXT_FIELDS = ("prompt", "question", "problem", "instruction", "text")
"""Fields that hold a user's turn, in the order in which they are looked for, after `messages` and `turns`."""

Messages = list[dict[str, str]]


class Prompt(NamedTuple):
    """A prompt as the target sees it, ready for its answer."""

    token_ids: list[int]
    source: str


@dataclass
class LeftOut:
    """Rows that were not used: how many for each reason, and where the first of them is."""

    counts: dict[str, int] = field(default_factory=dict)
    first: dict[str, str] = field(default_factory=dict)

    def add(self, reason: str, where: str) -> None:
        self.counts[reason] = self.counts.get(reason, 0) + 1
        self.first.setdefault(reason, where)

    def lines(self) -> list[str]:
        return [f"left out {count} rows: {reason} (first: {self.first[reason]})" for reason, count in self.counts.items()]


def read_prompts(path: Path, tokenizer: PreTrainedTokenizerFast, *, suffix: str = "", left_out: LeftOut | None = None) -> list[Prompt]:
    """One prompt for each JSON line with `messages`, `turns` or one of TEXT_FIELDS.

    Of `messages` what the model would be asked, so without the answer that may end them; of `turns` the first. `suffix` goes behind the
    last user turn. Raises InvalidRequest that names the line which is no JSON object; rows without a usable prompt go to `left_out`.
    """
    return [suffixed for _, suffixed in _prompt_pairs(path, tokenizer, suffix, left_out or LeftOut())]


def draw_prompts(
    paths: list[Path],
    tokenizer: PreTrainedTokenizerFast,
    *,
    exclude: list[Path],
    limit: int | None,
    suffix: str,
    seed: int,
    left_out: LeftOut | None = None,
) -> list[Prompt]:
    """Prompts of several files without repeats, at most `limit` of each, none of which `exclude` holds too (suffix aside)."""
    barred = {tuple(bare.token_ids) for path in exclude for bare, _ in _prompt_pairs(path, tokenizer, "", LeftOut())}
    chosen: dict[tuple[int, ...], Prompt] = {}
    for path in paths:
        pairs = list(_prompt_pairs(path, tokenizer, suffix, left_out or LeftOut()))
        new = {tuple(prompt.token_ids): prompt for bare, prompt in pairs if tuple(bare.token_ids) not in barred}
        allowed = [token_ids for token_ids in new if token_ids not in chosen]
        random.Random(seed).shuffle(allowed)
        chosen.update({token_ids: new[token_ids] for token_ids in allowed[:limit]})
    return list(chosen.values())


def _prompt_pairs(path: Path, tokenizer: PreTrainedTokenizerFast, suffix: str, left_out: LeftOut) -> Iterator[tuple[Prompt, Prompt]]:
    """Each prompt of a file, without the suffix and with it."""
    for number, row in _rows(path):
        try:
            messages = _messages(row)
            bare = Prompt(encode_chat(tokenizer, messages), path.stem)
            if suffix:
                messages[-1] = messages[-1] | {"content": messages[-1]["content"] + suffix}
            yield bare, Prompt(encode_chat(tokenizer, messages), path.stem) if suffix else bare
        except InvalidRequest as error:
            left_out.add(str(error), f"{path}, line {number}")


def _rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """The JSON objects of a file with their line numbers. Only a newline ends a line: text may hold other separators."""
    if not path.is_file():
        raise InvalidRequest(f"{path}: no such file")
    try:
        lines = path.read_bytes().decode("utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"{path}: it can't be read ({error}); save it as UTF-8") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise InvalidRequest(f"{path}, line {number}: not JSON ({error})") from error
        if not isinstance(row, dict):
            raise InvalidRequest(f"{path}, line {number}: a JSON object is expected")
        yield number, row


def _messages(row: dict[str, Any]) -> Messages:
    """The conversation that a row asks the model to go on with. Raises InvalidRequest for a row without one."""
    if row.get("messages"):
        return _asked(row["messages"])
    turns = row.get("turns")
    if isinstance(turns, list) and turns and isinstance(turns[0], str) and turns[0].strip():
        return [{"role": "user", "content": turns[0].strip()}]
    for name in TEXT_FIELDS:
        if isinstance(row.get(name), str) and row[name].strip():
            return [{"role": "user", "content": row[name].strip() + _task_input(row)}]
    raise InvalidRequest(f"no text in messages, turns, {', '.join(TEXT_FIELDS)}")


def _asked(messages: Any) -> Messages:
    """A conversation up to its last user turn."""
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise InvalidRequest("messages is no list of messages")
    if any(not isinstance(message.get("content"), str) or not isinstance(message.get("role"), str) for message in messages):
        raise InvalidRequest("a message whose role or content is no text")
    asked = [{"role": message["role"], "content": message["content"]} for message in messages]
    while asked and asked[-1]["role"] != "user":
        asked.pop()
    if not asked or not asked[-1]["content"].strip():
        raise InvalidRequest("messages without a user's turn, or with an empty one at their end")
    return asked


def _task_input(row: dict[str, Any]) -> str:
    """Self-instruct rows carry the input of their task apart."""
    instances = row.get("instances")
    first = instances[0] if isinstance(instances, list) and instances else None
    given = first.get("input") if isinstance(first, dict) else None
    return f"\n\n{given.strip()}" if isinstance(given, str) and given.strip() else ""
