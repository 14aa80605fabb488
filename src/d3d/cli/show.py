"""Answers on a terminal. A model's text is written as is: no markup, wrapping or expanded tabs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from d3d.api import Model
    from d3d.results import GenerationResult, StreamChunk

LEGEND = (
    f"{typer.style('green', fg='green')}: drafted and kept; "
    f"{typer.style('bold', bold=True)}: the target's own"
)


def stream_answer(
    chunks: Iterable[StreamChunk], *, tokenizer: PreTrainedTokenizerFast | None = None
) -> GenerationResult:
    """Print an answer to standard output as it grows, then a newline; with a tokenizer, in two
    colours. Returns the result."""
    painter = Painter(tokenizer) if tokenizer is not None else None
    result = None
    try:
        for chunk in chunks:
            if painter is None:
                typer.echo(chunk.text, nl=False)
            else:
                typer.echo(
                    "".join(paint(text, kept) for text, kept in painter.pieces(chunk)),
                    nl=False,
                    color=True,
                )
            result = chunk.result
    finally:  # also after Ctrl-C in the middle of a line
        typer.echo()
    assert result is not None, "the last chunk carries the result"
    return result


def paint(text: str, kept: bool) -> str:
    """Colour text by origin: green if the drafter proposed it and the target kept it, bold if the
    target wrote it."""
    return typer.style(text, fg="green") if kept else typer.style(text, bold=True)


class Painter:
    """Splits a stream's text by the origin of its tokens.

    The stream's text may lag behind its tokens (half a character, the beginning of a stop string),
    so the tokens are decoded once more, and the streamed text is taken off the front. A character
    belongs to the token that completes it."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        from d3d.text.answers import Detokenizer

        self._detokenizer = Detokenizer(tokenizer)
        self._waiting: list[tuple[str, bool]] = []

    def pieces(self, chunk: StreamChunk) -> Iterator[tuple[str, bool]]:
        """The chunk's text, cut where its origin changes; True if the piece was drafted and
        kept."""
        kept = False
        for place, token_id in enumerate(chunk.token_ids):
            kept = place < chunk.num_accepted
            self._waiting.append((self._detokenizer.push(token_id), kept))
        rest = len(chunk.text)
        while rest and self._waiting:
            text, kept = self._waiting.pop(0)
            if len(text) > rest:
                self._waiting.insert(0, (text[rest:], kept))
            if shown := chunk.text[len(chunk.text) - rest :][: len(text)]:
                yield shown, kept
            rest = max(0, rest - len(text))
        if rest:  # half a character, released at the end
            yield chunk.text[-rest:], kept


def why_plain(asked: str | None, model: Model) -> str:
    """Why an answer was decoded plainly. asked: the request's method."""
    if asked != "plain" and model.preset is not None and model.preset.method == "plain":
        return "the preset decodes plainly"
    if asked == "plain" or model.has_drafter:
        return "plain mode"
    return "no drafter was given, --drafter names one"


def summary(result: GenerationResult, dtype: str, why_plain: str) -> str:
    """Summary in one line: cost, dtype, and whether drafting was on, and if not, why."""
    tpot = (
        f"{1000 * result.timing.tpot_s:.1f} ms a token"
        if result.timing.tpot_s is not None
        else "one token"
    )
    first = f"first after {1000 * result.timing.ttft_s:.0f} ms"
    line = (
        f"{result.usage.completion_tokens} tokens, {tpot}, {first}, {dtype}, {result.finish_reason}"
    )
    speculation = result.speculation
    if speculation is None:
        return f"{line}; speculation: off ({why_plain})"
    mode = (
        speculation.mode if speculation.choice is None else f"auto chose {speculation.choice.mode}"
    )
    line = (
        f"{line}; speculation: {mode}, {speculation.rounds} rounds, acceptance length "
        f"{speculation.acceptance_length:.2f}"
    )
    overlap = speculation.overlap
    if overlap is None or overlap.hit_rate is None:
        return line
    fallbacks = ", ".join(f"{cause} {count}" for cause, count in overlap.fallbacks.items())
    ratio = overlap.overlap_ratio or 0
    hidden = f"{line}, hit rate {overlap.hit_rate:.2f}, overlap {ratio:.2f}"
    return f"{hidden}, without a draft: {fallbacks}" if fallbacks else hidden
