"""`d3d generate`: answer one prompt."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from d3d.cli import options as o


def generate(
    prompt: Annotated[
        str, typer.Option(help="One user turn through the chat template; - reads standard input.")
    ],
    model: o.ModelOption = None,
    target: o.TargetOption = None,
    drafter: o.DrafterOption = None,
    mode: o.ModeOption = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Take the prompt as it is, without the chat template.")
    ] = False,
    max_tokens: o.MaxTokensOption = 256,
    temperature: o.TemperatureOption = 0.0,
    top_k: o.TopKOption = 0,
    top_p: o.TopPOption = 1.0,
    min_p: o.MinPOption = 0.0,
    repetition_penalty: o.RepetitionOption = 1.0,
    presence_penalty: o.PresenceOption = 0.0,
    frequency_penalty: o.FrequencyOption = 0.0,
    logit_bias: o.LogitBiasOption = None,
    min_tokens: o.MinTokensOption = 0,
    stop: o.StopOption = None,
    stop_token_id: o.StopTokenOption = None,
    seed: o.SeedOption = None,
    logprobs: o.LogprobsOption = None,
    draft_length: o.DraftLengthOption = None,
    draft_confidence: o.DraftConfidenceOption = None,
    lookup: o.LookupOption = None,
    least_kept: o.LeastKeptOption = None,
    denoise_steps: o.DenoiseStepsOption = None,
    rows: o.RowsOption = None,
    outcomes: o.OutcomesOption = None,
    miss_policy: o.MissPolicyOption = None,
    placement: o.PlacementOption = None,
    trace: o.TraceOption = None,
    record: o.RecordOption = None,
    record_text: o.RecordTextOption = False,
    thinking: o.ThinkingOption = None,
    engine: o.EngineOption = "native",
    device: o.DeviceOption = "auto",
    quantize: o.QuantizeOption = None,
    dtype: o.DTypeOption = "auto",
    color: o.ColorOption = False,
    dry_run: o.DryRunOption = False,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="Print one JSON object as the last line of standard output."),
    ] = False,
) -> None:
    """Answer one prompt; the text streams to standard output, a summary goes to standard error."""
    sampling = o.sampling_options(locals())
    from d3d.cli.console import note
    from d3d.cli.show import LEGEND, stream_answer, summary
    from d3d.decoding.modes import ModeOptions
    from d3d.errors import InvalidRequest
    from d3d.lab.tune.traffic import TrafficRequest

    if logprobs is not None and not as_json:
        raise InvalidRequest(
            "--logprobs is shown by --json only; add --json, or leave --logprobs out"
        )
    o.check_trace(trace)
    log = o.traffic_log(record, with_text=record_text)
    text = o.read_prompt(prompt, raw=raw)
    choice = o.ModelChoice(model, target, drafter, mode, device, dtype, engine, quantize)
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
    if dry_run:
        o.show_dry_run(choice, options, max_tokens, as_json=as_json)
        return
    loaded = choice.load()
    chunks = loaded.stream(
        text, mode=mode, raw=raw, thinking=thinking, **options._asdict(), **sampling
    )
    if warning := o.thinking_warning(loaded.target, thinking):
        note(warning, "yellow")
    result = stream_answer(chunks, tokenizer=loaded.tokenizer if color else None)
    note(
        summary(result, loaded.precision, has_drafter=mode == "plain" or loaded.drafter is not None)
    )
    if color:
        typer.echo(LEGEND, err=True)
    o.note_speculation(result)
    o.record_request(log, loaded, TrafficRequest(text, options, sampling, raw), result)
    if trace is not None:
        o.write_trace(trace, result, loaded.precision)
    if as_json:
        typer.echo(json.dumps(result.to_dict()))
