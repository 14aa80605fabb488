"""`d3d chat`: a conversation in the terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from d3d.cli import options as o
from d3d.config import SpeculativeChoice

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from d3d.cli.options import ModelChoice
    from d3d.results import GenerationResult, StreamChunk


@o.takes(
    o.MODEL,
    o.sampling("max_tokens", "temperature", "top_p", "seed", max_tokens=512),
    o.SPECULATION,
)
def chat(
    *,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    thinking: o.ThinkingOption = None,
    color: o.ColorOption = False,
    record: o.RecordOption = None,
    record_text: o.RecordTextOption = False,
    dry_run: o.DryRunOption = False,
    choice: ModelChoice,
    sampling: dict[str, Any],
    speculation: SpeculativeChoice,
) -> None:
    """Talk with a model, turn by turn. /new starts over; Ctrl-C ends an answer, /exit or Ctrl-D the
    conversation."""
    from d3d.cli import requests
    from d3d.cli.console import note
    from d3d.cli.show import LEGEND, summary, why_plain
    from d3d.errors import InvalidRequest
    from d3d.lab.tune.traffic import Asked

    log = requests.traffic_log(record, with_text=record_text)
    if dry_run:
        requests.show_dry_run(choice, speculation, sampling["max_tokens"], as_json=False)
        return
    with choice.load(speculation) as loaded:
        options = {"method": speculation.method, **speculation.options}
        loaded.config(**options)
        for text in (
            requests.thinking_warning(loaded.target, thinking),
            "/new starts over; Ctrl-C ends an answer; /exit or Ctrl-D ends"
            if sys.stdin is not None and sys.stdin.isatty()
            else None,
        ):
            if text:
                note(text)
        if color:
            typer.echo(LEGEND, err=True)
        opening = [{"role": "system", "content": system}] if system else []
        messages = list(opening)
        while (turn := _read_turn()) is not None:
            if turn == "/new":
                messages = list(opening)
                continue
            messages.append({"role": "user", "content": turn})
            try:
                chunks = loaded.stream(messages, thinking=thinking, **options, **sampling)
            except InvalidRequest as error:
                if len(messages) == len(opening) + 1:
                    raise
                note(f"{error}; /new starts over", "yellow")
                messages.pop()
                continue
            result = _answer(chunks, loaded.tokenizer if color else None)
            if result is None:
                messages.pop()
                continue
            requests.record_request(log, loaded, Asked(messages, options, sampling), result)
            messages.append({"role": "assistant", "content": result.text})
            note(summary(result, loaded.precision, why_plain(speculation.method, loaded)))
            requests.note_speculation(result)


def _answer(
    chunks: Iterator[StreamChunk], tokenizer: PreTrainedTokenizerFast | None
) -> GenerationResult | None:
    """Print an answer; None if Ctrl-C ended it. The conversation goes on."""
    from d3d.cli import show
    from d3d.cli.console import note

    try:
        return show.stream_answer(chunks, tokenizer=tokenizer)
    except KeyboardInterrupt:
        note("interrupted; the turn is forgotten", "yellow")
        return None


def _read_turn() -> str | None:
    """Read the next non-empty turn; None at the end of input. Raises InvalidRequest if the input is
    not text."""
    from d3d.cli.console import note
    from d3d.cli.requests import standard_input

    while True:
        with standard_input() as stream:
            if stream.isatty():
                print("> ", end="", file=sys.stderr, flush=True)
            line = stream.readline()
        if not line or line.strip() == "/exit":
            return None
        turn = line.strip()
        if turn.startswith("/") and turn != "/new":
            note(f"there is no command {turn.split()[0]}; /new starts over, /exit ends", "yellow")
        elif turn:
            return turn
