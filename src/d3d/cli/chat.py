"""`d3d chat`: a conversation in the terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from d3d.cli import options as o

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from d3d.decoding.results import GenerationResult, StreamChunk


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
    draft_confidence: o.DraftConfidenceOption = None,
    lookup: o.LookupOption = None,
    least_kept: o.LeastKeptOption = None,
    denoise_steps: o.DenoiseStepsOption = None,
    rows: o.RowsOption = None,
    outcomes: o.OutcomesOption = None,
    miss_policy: o.MissPolicyOption = None,
    placement: o.PlacementOption = None,
    record: o.RecordOption = None,
    record_text: o.RecordTextOption = False,
    thinking: o.ThinkingOption = None,
    engine: o.EngineOption = "native",
    device: o.DeviceOption = "auto",
    quantize: o.QuantizeOption = None,
    dtype: o.DTypeOption = "auto",
    color: o.ColorOption = False,
    dry_run: o.DryRunOption = False,
) -> None:
    """Talk with a model, turn by turn. /new starts over; Ctrl-C ends an answer, /exit or Ctrl-D the
    conversation."""
    sampling = o.sampling_options(
        {"max_tokens": max_tokens, "temperature": temperature, "top_p": top_p, "seed": seed}
    )
    from d3d.cli.console import note
    from d3d.cli.show import LEGEND, summary
    from d3d.decoding.modes import ModeOptions
    from d3d.errors import InvalidRequest
    from d3d.lab.tune.traffic import TrafficRequest

    log = o.traffic_log(record, with_text=record_text)
    options = ModeOptions(
        draft_length,
        denoise_steps,
        rows,
        outcomes,
        miss_policy,
        placement,
        draft_confidence,
        lookup,
        least_kept,
    )
    choice = o.ModelChoice(model, target, drafter, mode, device, dtype, engine, quantize)
    if dry_run:
        o.show_dry_run(choice, options, max_tokens, as_json=False)
        return
    loaded = choice.load()
    for text in (
        o.thinking_warning(loaded.target, thinking),
        "/new starts over; Ctrl-C ends an answer; /exit or Ctrl-D ends"
        if sys.stdin.isatty()
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
            chunks = loaded.stream(
                messages, mode=mode, thinking=thinking, **options._asdict(), **sampling
            )
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
        o.record_request(log, loaded, TrafficRequest(messages, options, sampling), result)
        messages.append({"role": "assistant", "content": result.text})
        note(
            summary(
                result, loaded.precision, has_drafter=mode == "plain" or loaded.drafter is not None
            )
        )
        o.note_speculation(result)


def _answer(
    chunks: Iterator[StreamChunk], tokenizer: PreTrainedTokenizerFast | None
) -> GenerationResult | None:
    """Print an answer; None where Ctrl-C ended it, which does not end the conversation."""
    from d3d.cli import show
    from d3d.cli.console import note

    try:
        return show.stream_answer(chunks, tokenizer=tokenizer)
    except KeyboardInterrupt:
        note("interrupted; the turn is forgotten", "yellow")
        return None


def _read_turn() -> str | None:
    """The next turn that is not empty; None at the end. Raises InvalidRequest for input that is no
    text."""
    from d3d.cli.console import note
    from d3d.errors import InvalidRequest

    while True:
        if sys.stdin.isatty():
            print("> ", end="", file=sys.stderr, flush=True)
        try:
            line = sys.stdin.readline()
        except UnicodeDecodeError as error:
            raise InvalidRequest(f"standard input is not UTF-8 text ({error})") from error
        if not line or line.strip() == "/exit":
            return None
        turn = line.strip()
        if turn.startswith("/") and turn != "/new":
            note(f"there is no command {turn.split()[0]}; /new starts over, /exit ends", "yellow")
        elif turn:
            return turn
