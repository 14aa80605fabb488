"""`d3d generate`: answer one prompt."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from d3d.cli import options as o
from d3d.config import SpeculativeChoice
from d3d.json_text import to_json

if TYPE_CHECKING:
    from d3d.cli.options import ModelChoice


@o.takes(o.MODEL, o.sampling(), o.SPECULATION)
def generate(
    *,
    prompt: Annotated[
        str | None,
        typer.Argument(help="One user turn through the chat template; - reads standard input."),
    ] = None,
    prompt_option: Annotated[
        str | None, typer.Option("--prompt", help="Alias of PROMPT.", hidden=True)
    ] = None,
    raw: Annotated[
        bool,
        typer.Option(
            "--raw",
            help="Take the prompt as it is, without the chat template; it may spell control "
            "tokens.",
            rich_help_panel="Sampling",
        ),
    ] = False,
    thinking: o.ThinkingOption = None,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json",
            help="Print one JSON object as the last line of standard output.",
            rich_help_panel="Output",
        ),
    ] = False,
    color: o.ColorOption = False,
    trace: o.TraceOption = None,
    record: o.RecordOption = None,
    record_text: o.RecordTextOption = False,
    dry_run: o.DryRunOption = False,
    choice: ModelChoice,
    sampling: dict[str, Any],
    speculation: SpeculativeChoice,
) -> None:
    """Answer one prompt; the text streams to standard output, a summary goes to standard error."""
    from d3d.cli import requests
    from d3d.cli.console import note
    from d3d.cli.show import LEGEND, stream_answer, summary, why_plain
    from d3d.errors import InvalidRequest
    from d3d.lab.tune.traffic import Asked

    if sampling["logprobs"] is not None and not as_json:
        raise InvalidRequest(
            "--logprobs is shown by --json only; add --json, or leave --logprobs out"
        )
    held = requests.hold_trace(trace)
    log = requests.traffic_log(record, with_text=record_text)
    text = requests.read_prompt(prompt, prompt_option, raw=raw)
    if dry_run:
        requests.show_dry_run(choice, speculation, sampling["max_tokens"], as_json=as_json)
        return
    with held, choice.load(speculation) as loaded:
        options = {"method": speculation.method, **speculation.options}
        chunks = loaded.stream(text, raw=raw, thinking=thinking, **options, **sampling)
        if warning := requests.thinking_warning(loaded.target, thinking):
            note(warning, "yellow")
        result = stream_answer(chunks, tokenizer=loaded.tokenizer if color else None)
        note(summary(result, loaded.precision, why_plain(speculation.method, loaded)))
        if color:
            typer.echo(LEGEND, err=True)
        requests.note_speculation(result)
        requests.record_request(log, loaded, Asked(text, options, sampling, raw), result)
        if as_json:
            typer.echo(to_json(result.to_dict()))
        if trace is not None:
            requests.write_trace(trace, result, loaded.precision)
