"""Training prompts: JSON lines of many shapes become chat prompts in token ids."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from d3d.core.errors import InvalidRequest
from d3d.models.chat import encode_chat

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

TEXT_FIELDS = ("prompt", "question", "problem", "instruction", "text")
"""Fields that hold a user's turn, in the order in which they are looked for."""


class Prompt(NamedTuple):
    """A prompt as the target sees it, ready for its answer."""

    token_ids: list[int]
    source: str


def read_prompts(path: Path, tokenizer: PreTrainedTokenizerFast, *, suffix: str = "") -> list[Prompt]:
    """One prompt for each JSON line with `messages`, or with one of TEXT_FIELDS. Raises InvalidRequest that names the line."""
    if not path.is_file():
        raise InvalidRequest(f"{path}: no such file")
    prompts = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if line.strip():
            prompts.append(Prompt(encode_chat(tokenizer, _messages(path, number, line, suffix)), path.stem))
    return prompts


def _messages(path: Path, number: int, line: str, suffix: str) -> list[dict[str, str]]:
    try:
        row: dict[str, Any] = json.loads(line)
    except json.JSONDecodeError as error:
        raise InvalidRequest(f"{path}, line {number}: not JSON ({error})") from error
    if isinstance(row.get("messages"), list) and row["messages"]:
        return [{"role": str(turn["role"]), "content": str(turn["content"])} for turn in row["messages"]]
    for name in TEXT_FIELDS:
        if isinstance(row.get(name), str) and row[name].strip():
            extra = _task_input(row)
            return [{"role": "user", "content": row[name].strip() + extra + suffix}]
    raise InvalidRequest(f"{path}, line {number}: neither messages nor any of {', '.join(TEXT_FIELDS)}")


def _task_input(row: dict[str, Any]) -> str:
    """Self-instruct rows carry the input of their task apart."""
    instances = row.get("instances")
    given = instances[0].get("input", "") if isinstance(instances, list) and instances else ""
    return f"\n\n{given.strip()}" if isinstance(given, str) and given.strip() else ""


def draw_prompts(
    paths: list[Path], tokenizer: PreTrainedTokenizerFast, *, exclude: list[Path], limit: int | None, suffix: str, seed: int
) -> list[Prompt]:
    """Prompts of several files without repeats, at most `limit` of each, none of which `exclude` holds too (suffix aside)."""
    barred = {tuple(prompt.token_ids) for path in exclude for prompt in read_prompts(path, tokenizer)}
    chosen: dict[tuple[int, ...], Prompt] = {}
    for path in paths:
        pairs = list(zip(read_prompts(path, tokenizer), read_prompts(path, tokenizer, suffix=suffix), strict=True))
        allowed = [prompt for bare, prompt in pairs if tuple(bare.token_ids) not in barred]
        random.Random(seed).shuffle(allowed)
        for prompt in allowed[:limit]:
            chosen.setdefault(tuple(prompt.token_ids), prompt)
    return list(chosen.values())
