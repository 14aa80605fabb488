"""How answers look on a terminal."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

if TYPE_CHECKING:
    from d3d.decoding.results import GenerationResult, StreamChunk

KEPT_STYLE = "green"
"""Tokens that the drafter proposed and the target kept."""
OWN_STYLE = "bold"
"""Tokens that the target wrote itself."""


def stream_answer(chunks: Iterator[StreamChunk], console: Console, *, tokenizer: object | None = None) -> GenerationResult:
    """Print an answer while it grows; with a tokenizer in colour, token by token. Returns the result."""
    result = None
    for chunk in chunks:
        if tokenizer is None:
            console.out(chunk.text, end="", highlight=False)
        elif chunk.text:
            console.print(colored(chunk, tokenizer), end="", soft_wrap=True)
        result = chunk.result
    console.out("", highlight=False)
    assert result is not None, "the last chunk carries the result"
    return result


def colored(chunk: StreamChunk, tokenizer: object) -> Text:
    """The chunk's text; where it falls into its tokens' texts each has the colour of its origin."""
    pieces = [tokenizer.decode([token_id]) for token_id in chunk.token_ids]  # type: ignore[attr-defined]
    text = Text()
    rest = chunk.text
    for place, piece in enumerate(pieces):
        style = KEPT_STYLE if place < chunk.num_accepted else OWN_STYLE
        if place == len(pieces) - 1 or not rest.startswith(piece):
            text.append(rest, style=style)
            return text
        text.append(piece, style=style)
        rest = rest[len(piece) :]
    return text


def summary(result: GenerationResult) -> str:
    """One line: what it cost, and whether drafting was on."""
    tpot = f"{1000 * result.timing.tpot_s:.1f} ms a token" if result.timing.tpot_s is not None else "one token"
    line = f"{result.usage.completion_tokens} tokens, {tpot}, first after {1000 * result.timing.ttft_s:.0f} ms, {result.finish_reason}"
    speculation = result.speculation
    if speculation is None:
        return f"{line}; speculation: off (plain mode)"
    return f"{line}; speculation: {speculation.mode}, {speculation.rounds} rounds, acceptance length {speculation.acceptance_length:.2f}"
