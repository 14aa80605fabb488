"""Training prompts: rows of prompt files become chat prompts in token ids, and some are drawn.

A row without a usable prompt is left out and counted. A problem of an evaluation set is refused,
left out or allowed, as the options say."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from d3d.errors import InvalidRequest
from d3d.text.prompts import encode_chat
from d3d.train.evaluation_sets import SETS, EvaluationSets, apply_format, known_sets
from d3d.train.prompt_rows import Conversation, Message, PromptRows, read_conversation, read_rows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

NO_ROOM = "a prompt that leaves no room for an answer in the target's context"
"""Reason to leave a prompt out."""
OnEvaluationPrompt = Literal["refuse", "skip", "allow"]
Located = tuple[str, Conversation]
"""File and line (for messages), and the conversation there."""


class TrainingPrompt(NamedTuple):
    """A prompt as the target sees it, ready for its answer."""

    token_ids: list[int]
    source: str
    where: str = ""
    """File and line, for messages."""
    messages: tuple[Message, ...] = ()
    later: tuple[str, ...] = ()
    """The user's next turns, each to be asked once the turn before has been answered."""


@dataclass
class LeftOut:
    """Rows that were not used: their number by reason, and the location of each reason's first."""

    counts: dict[str, int] = field(default_factory=dict)
    first: dict[str, str] = field(default_factory=dict)
    fields: dict[str, int] = field(default_factory=dict)
    """Fields that were not read of the rows that were used, and the number of these rows."""

    def add(self, reason: str, where: str) -> None:
        self.counts[reason] = self.counts.get(reason, 0) + 1
        self.first.setdefault(reason, where)

    def add_fields(self, names: Sequence[str]) -> None:
        for name in names:
            self.fields[name] = self.fields.get(name, 0) + 1

    def lines(self) -> list[str]:
        lines = [
            f"left out {count} rows: {reason} (first: {self.first[reason]})"
            for reason, count in self.counts.items()
        ]
        if self.fields:
            told = ", ".join(f"{name} ({count} rows)" for name, count in self.fields.items())
            lines.append(f"fields that were not read: {told}")
        return lines


@dataclass(frozen=True)
class PromptOptions:
    """Which prompts are drawn, and in which format."""

    limit: int | None = None
    """Most prompts of each source."""
    suffix: str = ""
    """Answer format, as `apply_format` takes it."""
    suffix_share: float = 1.0
    """Share of the prompts that get the suffix."""
    thinking: bool | None = None
    seed: int = 0
    evaluation_prompts: OnEvaluationPrompt = "allow"


@dataclass
class Drawn:
    """Prompts, and a record of how they were drawn."""

    prompts: list[TrainingPrompt] = field(default_factory=list)
    sources: list[PromptRows] = field(default_factory=list)
    left_out: LeftOut = field(default_factory=LeftOut)
    evaluation: LeftOut = field(default_factory=LeftOut)
    """Problems of evaluation sets among the rows, by set."""


def read_prompts(
    path: Path,
    tokenizer: PreTrainedTokenizerFast,
    *,
    suffix: str = "",
    left_out: LeftOut | None = None,
) -> list[TrainingPrompt]:
    """The prompt of each row of a file, without a search for evaluation sets.

    left_out: collects rows without a usable prompt. Raises InvalidRequest that names a line that is
    not a JSON object."""
    left_out = left_out or LeftOut()
    source = read_rows(str(path))
    rows = _conversations(source, left_out)
    return list(_encoded(rows, source.name, tokenizer, PromptOptions(suffix=suffix), left_out))


def draw_prompts(
    specs: Sequence[str],
    tokenizer: PreTrainedTokenizerFast,
    options: PromptOptions,
    *,
    exclude: Sequence[str] = (),
) -> Drawn:
    """Draw at most `limit` distinct prompts of each source by `seed`.

    specs: sources as `read_rows` takes them; exclude: sources whose prompts are not drawn,
    whatever their answer format, punctuation and white space. Raises InvalidRequest and
    MissingExtra as `read_rows` does, and InvalidRequest that names the first problem of an
    evaluation set, unless these are skipped or allowed."""
    excluded = {
        conversation.key
        for spec in exclude
        for _, conversation in _conversations(read_rows(spec), LeftOut())
    }
    drawn = Drawn(sources=[read_rows(spec) for spec in specs])
    known = known_sets()
    chosen: dict[tuple[int, ...], TrainingPrompt] = {}
    for source in drawn.sources:
        usable = []
        for where, conversation in _conversations(source, drawn.left_out):
            if conversation.key in excluded:
                drawn.left_out.add("excluded", where)
            elif _may_be_used(where, conversation, known, options, drawn):
                usable.append((where, conversation))
        new: dict[tuple[int, ...], TrainingPrompt] = {}
        for prompt in _encoded(usable, source.name, tokenizer, options, drawn.left_out):
            token_ids = tuple(prompt.token_ids)
            if token_ids in new or token_ids in chosen:
                drawn.left_out.add("the same prompt again", prompt.where)
            else:
                new[token_ids] = prompt
        order = list(new)
        random.Random(options.seed).shuffle(order)
        chosen.update({token_ids: new[token_ids] for token_ids in order[: options.limit]})
    if drawn.evaluation.counts and options.evaluation_prompts == "refuse":
        raise InvalidRequest(_refusal(drawn.evaluation))
    drawn.prompts = list(chosen.values())
    if not drawn.prompts:
        raise InvalidRequest(
            "; ".join([f"{', '.join(specs)}: no prompt is left to answer", *drawn.left_out.lines()])
        )
    return drawn


def _may_be_used(
    where: str,
    conversation: Conversation,
    known: EvaluationSets,
    options: PromptOptions,
    drawn: Drawn,
) -> bool:
    set_name = next(filter(None, map(known.find, conversation.user_texts)), None)
    if set_name is None:
        return True
    drawn.evaluation.add(set_name, where)
    if options.evaluation_prompts == "skip":
        drawn.left_out.add(f"a problem of {SETS[set_name]}, an evaluation set", where)
    return options.evaluation_prompts == "allow"


def _refusal(met: LeftOut) -> str:
    set_name, where = next(iter(met.first.items()))
    counts = ", ".join(f"{count} of {SETS[name]}" for name, count in met.counts.items())
    return (
        f"{where}: this is a problem of {SETS[set_name]}, and evaluation sets are not trained on "
        f"({counts} in all); leave them out with --skip-evaluation-prompts, or make a corpus to "
        "evaluate on with --allow-evaluation-prompts"
    )


def _conversations(source: PromptRows, left_out: LeftOut) -> list[Located]:
    conversations = []
    for where, row in source.rows:
        try:
            conversation = read_conversation(row)
        except InvalidRequest as error:
            left_out.add(str(error), where)
        else:
            left_out.add_fields(conversation.not_read)
            conversations.append((where, conversation))
    return conversations


def _encoded(
    conversations: list[Located],
    source: str,
    tokenizer: PreTrainedTokenizerFast,
    options: PromptOptions,
    left_out: LeftOut,
) -> Iterator[TrainingPrompt]:
    for where, (messages, later, _) in conversations:
        try:
            token_ids = encode_chat(tokenizer, messages, thinking=options.thinking)
            if options.suffix and _gets_suffix(token_ids, options):
                text = apply_format(options.suffix, messages[-1]["content"])
                messages = [*messages[:-1], messages[-1] | {"content": text}]
                token_ids = encode_chat(tokenizer, messages, thinking=options.thinking)
            yield TrainingPrompt(token_ids, source, where, tuple(messages), later)
        except InvalidRequest as error:
            left_out.add(str(error), where)


def _gets_suffix(token_ids: list[int], options: PromptOptions) -> bool:
    """Drawn from the prompt's own ids, so neither a file's order nor a limit changes it."""
    digest = hashlib.sha256(f"format {options.seed} {token_ids}".encode()).digest()
    return int.from_bytes(digest[:8], "big") < options.suffix_share * 2.0**64
