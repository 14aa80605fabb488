"""`d3d chat`: a conversation in the terminal."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from d3d.cli import options as o


def chat(
    model: o.ModelOption = None,
    target: o.TargetOption = None,
    drafter: o.DrafterOption = None,
    mode: o.ModeOption = None,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    max_tokens: o.MaxTokensOption = 512,
    temperature: o.TemperatureOption = 0.0,
    top_p: o.TopPOption = 1.0,
    seed: o.SeedOption = None,
    draft_length: o.DraftLengthOption = None,
    denoise_steps: o.DenoiseStepsOption = None,
    thinking: o.ThinkingOption = None,
    device: o.DeviceOption = "auto",
    dtype: o.DTypeOption = "auto",
    color: o.ColorOption = False,
) -> None:
    """Talk with a model, turn by turn. /new starts over; /exit or Ctrl-D ends."""
    sampling = o.sampling_options({"max_tokens": max_tokens, "temperature": temperature, "top_p": top_p, "seed": seed})
    from d3d.cli.console import note
    from d3d.cli.show import LEGEND, stream_answer, summary
    from d3d.core.errors import InvalidRequest

    loaded = o.ModelChoice(model, target, drafter, mode, device, dtype).load()
    for text in (o.thinking_warning(loaded, thinking), "/new starts over; /exit or Ctrl-D ends" if sys.stdin.isatty() else None):
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
            chunks = loaded.stream(
                messages, mode=mode, draft_length=draft_length, num_denoise_steps=denoise_steps, thinking=thinking, **sampling
            )
        except InvalidRequest as error:
            if len(messages) == len(opening) + 1:
                raise
            note(f"{error}; /new starts over", "yellow")
            messages.pop()
            continue
        result = stream_answer(chunks, tokenizer=loaded.tokenizer if color else None)
        messages.append({"role": "assistant", "content": result.text})
        note(summary(result, has_drafter=mode == "plain" or loaded.drafter is not None))
        for warning in result.speculation.warnings if result.speculation else ():
            note(f"warning: {warning}", "yellow")


def _read_turn() -> str | None:
    """The next turn that is not empty; None at the end. Raises InvalidRequest for input that is no text."""
    from d3d.core.errors import InvalidRequest

    while True:
        if sys.stdin.isatty():
            print("> ", end="", file=sys.stderr, flush=True)
        try:
            line = sys.stdin.readline()
        except UnicodeDecodeError as error:
            raise InvalidRequest(f"standard input is not UTF-8 text ({error})") from error
        if not line or line.strip() == "/exit":
            return None
        if line.strip():
            return line.strip()
