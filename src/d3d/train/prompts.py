"""Training prompts: conversations out of many kinds of files become chat prompts in token ids, and
some of them are drawn.

A row without a usable prompt is left out and counted; a problem of an evaluation set is refused,
left out or let pass, as chosen."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from d3d.errors import InvalidRequest
from d3d.hub.chat import encode_chat
from d3d.train.conversations import Conversation, Message, read_conversation
from d3d.train.evaluation_sets import SETS, EvaluationSets, known_sets
from d3d.train.formats import apply_format, format_text, is_drawn
from d3d.train.prompt_rows import PromptRows, read_rows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

OnEvaluationPrompt = Literal["refuse", "skip", "allow"]


class Prompt(NamedTuple):
    """A prompt as the target sees it, ready for its answer."""

    token_ids: list[int]
    source: str
    where: str = ""
    """For people: the file and line that it is from."""
    messages: tuple[Message, ...] = ()
    later: tuple[str, ...] = ()
    """What the user says next, turn by turn, when the target has answered."""


@dataclass
class LeftOut:
    """Rows that were not used: how many for each reason, and where the first of them is."""

    counts: dict[str, int] = field(default_factory=dict)
    first: dict[str, str] = field(default_factory=dict)

    def add(self, reason: str, where: str) -> None:
        self.counts[reason] = self.counts.get(reason, 0) + 1
        self.first.setdefault(reason, where)

    def lines(self) -> list[str]:
        return [
            f"left out {count} rows: {reason} (first: {self.first[reason]})"
            for reason, count in self.counts.items()
        ]


@dataclass(frozen=True)
class PromptOptions:
    """Which prompts are taken, and how they are put."""

    limit: int | None = None
    """Most prompts to take of each source."""
    suffix: str = ""
    """Name of a format, or text; see `d3d.train.formats`."""
    suffix_share: float = 1.0
    """Share of the prompts that get it."""
    thinking: bool | None = None
    seed: int = 0
    evaluation_prompts: OnEvaluationPrompt = "allow"


@dataclass
class Drawn:
    """Prompts, and what is worth telling about where they are from."""

    prompts: list[Prompt] = field(default_factory=list)
    sources: list[PromptRows] = field(default_factory=list)
    left_out: LeftOut = field(default_factory=LeftOut)
    evaluation: LeftOut = field(default_factory=LeftOut)
    """Problems of evaluation sets that were met, by set."""


def read_prompts(
    path: Path,
    tokenizer: PreTrainedTokenizerFast,
    *,
    suffix: str = "",
    left_out: LeftOut | None = None,
) -> list[Prompt]:
    """The prompt of each row of a file; no evaluation set is looked for. Rows without a usable
    prompt go to `left_out`. Raises InvalidRequest that names the line which is no JSON object."""
    left_out = left_out or LeftOut()
    source = read_rows(str(path))
    return list(
        _encoded(
            _conversations(source, left_out),
            source.name,
            tokenizer,
            PromptOptions(suffix=suffix),
            left_out,
        )
    )


def draw_prompts(
    specs: Sequence[str],
    tokenizer: PreTrainedTokenizerFast,
    options: PromptOptions,
    *,
    exclude: Sequence[str] = (),
) -> Drawn:
    """At most `limit` distinct prompts of each source, drawn by `seed`, none of which a source of
    `exclude` holds too (answer format, punctuation and white space aside).

    Sources are named as `read_rows` has it. Raises InvalidRequest and MissingExtra as that does,
    and InvalidRequest that names the first problem of an evaluation set, unless these are skipped
    or allowed."""
    barred = {
        conversation.key
        for spec in exclude
        for _, conversation in _conversations(read_rows(spec), LeftOut())
    }
    drawn = Drawn(sources=[read_rows(spec) for spec in specs])
    known = known_sets()
    chosen: dict[tuple[int, ...], Prompt] = {}
    for source in drawn.sources:
        wanted = []
        for where, conversation in _conversations(source, drawn.left_out):
            if conversation.key in barred:
                drawn.left_out.add("excluded", where)
            elif _may_be_used(where, conversation, known, options, drawn):
                wanted.append((where, conversation))
        new: dict[tuple[int, ...], Prompt] = {}
        for prompt in _encoded(wanted, source.name, tokenizer, options, drawn.left_out):
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
    return drawn


def _may_be_used(
    where: str,
    conversation: Conversation,
    known: EvaluationSets,
    options: PromptOptions,
    drawn: Drawn,
) -> bool:
    found = next(filter(None, map(known.find, conversation.user_texts)), None)
    if found is None:
        return True
    drawn.evaluation.add(found, where)
    if options.evaluation_prompts == "skip":
        drawn.left_out.add(f"a problem of {SETS[found]}, an evaluation set", where)
    return options.evaluation_prompts == "allow"


def _refusal(found: LeftOut) -> str:
    first = next(iter(found.first))
    counts = ", ".join(f"{count} of {SETS[name]}" for name, count in found.counts.items())
    return (
        f"{found.first[first]}: this is a problem of {SETS[first]}, and evaluation sets are not trained on ({counts} in all); leave "
        "them out with --skip-evaluation-prompts, or make a corpus to evaluate on with --allow-evaluation-prompts"
    )


def _conversations(source: PromptRows, left_out: LeftOut) -> list[tuple[str, Conversation]]:
    conversations = []
    for where, row in source.rows:
        try:
            conversations.append((where, read_conversation(row)))
        except InvalidRequest as error:
            left_out.add(str(error), where)
    return conversations


def _encoded(
    conversations: list[tuple[str, Conversation]],
    source: str,
    tokenizer: PreTrainedTokenizerFast,
    options: PromptOptions,
    left_out: LeftOut,
) -> Iterator[Prompt]:
    form = format_text(options.suffix)
    for where, (messages, later) in conversations:
        try:
            bare = encode_chat(tokenizer, messages, thinking=options.thinking)
            if options.suffix and is_drawn(bare, options.suffix_share, options.seed):
                last = messages[-1] | {"content": apply_format(form, messages[-1]["content"])}
                formatted = [*messages[:-1], last]
                yield Prompt(
                    encode_chat(tokenizer, formatted, thinking=options.thinking),
                    source,
                    where,
                    tuple(formatted),
                    later,
                )
            else:
                yield Prompt(bare, source, where, tuple(messages), later)
        except InvalidRequest as error:
            left_out.add(str(error), where)
