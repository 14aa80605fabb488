"""Options that several commands share, and what becomes of them. Each appears once, so its help and
its effect cannot drift apart."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from d3d.api import Model
    from d3d.decoding.modes import ModeOptions
    from d3d.decoding.results import GenerationResult
    from d3d.hub.open_model import TargetModel
    from d3d.lab.tune.traffic import TrafficLog, TrafficRequest

DEFAULT_MODEL = "smollm2-135m"

ModelOption = Annotated[
    str | None,
    typer.Option(
        help=f"Preset, or preset file, that brings target and drafter. Default: {DEFAULT_MODEL}, unless --target."
    ),
]
TargetOption = Annotated[
    str | None, typer.Option(help="Target: directory, GGUF file, hub id or preset.")
]
DrafterOption = Annotated[
    str | None, typer.Option(help="Drafter: directory or hub id. Default: the preset's own.")
]
ModeOption = Annotated[
    str | None,
    typer.Option(
        help="plain, serial, fused, async or auto, the fastest of these. Default: the preset file's, else serial with a drafter."
    ),
]
DeviceOption = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")]
EngineOption = Annotated[
    str,
    typer.Option(
        help="What runs the target: native, or transformers for any causal language model (slower; plain and serial only)."
    ),
]
DTypeOption = Annotated[str, typer.Option(help="auto, float32 or bfloat16.")]
QuantizeOption = Annotated[
    str | None,
    typer.Option(
        help="int8: eight-bit weights of target and drafter, on a CPU with VNNI. The target then is another model."
    ),
]
DraftLengthOption = Annotated[
    int | None,
    typer.Option(
        help="Most tokens to draft a round. Default: 5 in serial and async mode, 6 in fused, 8 there with --lookup."
    ),
]
RowsOption = Annotated[
    int | None,
    typer.Option(
        help="Fused mode: most rows of a pass a sequence. Default: the preset's, else measured at the start."
    ),
]
OutcomesOption = Annotated[
    int | None, typer.Option(help="Async mode: verdicts to prepare for in a round. Default: 1.")
]
MissPolicyOption = Annotated[
    str | None,
    typer.Option(
        help="Async mode, where no successor fits: draft_now (default) waits for a draft, bonus_only goes on without."
    ),
]
PlacementOption = Annotated[
    str | None,
    typer.Option(
        help="Async mode, where the drafter runs: thread, processes; CUDA: streams, devices."
    ),
]
TraceOption = Annotated[
    Path | None,
    typer.Option(
        help="Write what target and drafter did when, as a Chrome trace (opens in Perfetto)."
    ),
]
RecordOption = Annotated[
    Path | None,
    typer.Option(
        help="Add a line on this request to a file here: sampling, mode, what each round kept; for d3d calibrate and tune."
    ),
]
RecordTextOption = Annotated[
    bool,
    typer.Option("--record-text", help="With --record: the prompt's text, too. d3d tune needs it."),
]
DenoiseStepsOption = Annotated[
    int | None,
    typer.Option(help="Serial mode: drafter passes a block, at most the draft length. Default: 1."),
]
DraftConfidenceOption = Annotated[
    float | None,
    typer.Option(
        help="Serial mode: cut a draft where its chance to be kept, by the drafter's own figures, falls below this. Default: no cut."
    ),
]
LookupOption = Annotated[
    int | None,
    typer.Option(
        help="Serial and fused mode: where the text's last N or more tokens stand earlier in it, draft what followed them. 0: never."
    ),
]
LeastKeptOption = Annotated[
    float | None,
    typer.Option(
        help="Serial mode: ask the drafter only in every eighth round while its drafts keep fewer tokens in the mean. 0: always."
    ),
]
MaxTokensOption = Annotated[int, typer.Option(help="Longest answer in tokens.")]
TemperatureOption = Annotated[float, typer.Option(help="0 is greedy.")]
TopKOption = Annotated[int, typer.Option(help="Keep the k most likely tokens; 0 keeps all.")]
TopPOption = Annotated[
    float, typer.Option(help="Keep the smallest set of tokens with this probability.")
]
MinPOption = Annotated[
    float, typer.Option(help="Keep tokens at least this likely relative to the best.")
]
RepetitionOption = Annotated[
    float, typer.Option(help="Repetition penalty over prompt and answer; 1 is none.")
]
PresenceOption = Annotated[float, typer.Option(help="Presence penalty over the answer.")]
FrequencyOption = Annotated[float, typer.Option(help="Frequency penalty over the answer.")]
LogitBiasOption = Annotated[
    list[str] | None, typer.Option(help="ID:VALUE, added to a token's logit; may be repeated.")
]
MinTokensOption = Annotated[int, typer.Option(help="No end of the answer before this many tokens.")]
StopOption = Annotated[
    list[str] | None, typer.Option(help="String that ends the answer; may be repeated.")
]
StopTokenOption = Annotated[
    list[int] | None, typer.Option(help="Token id that ends the answer; may be repeated.")
]
SeedOption = Annotated[
    int | None, typer.Option(help="Noise of the sampler; a fresh one by default.")
]
LogprobsOption = Annotated[
    int | None,
    typer.Option(
        help="Report each token's log-probability and this many best alternatives; needs --json."
    ),
]
ThinkingOption = Annotated[
    bool | None,
    typer.Option(
        "--thinking/--no-thinking", help="Handed to the chat template as enable_thinking."
    ),
]
DryRunOption = Annotated[
    bool,
    typer.Option(
        "--dry-run", help="Say what would run where, load no weights, and answer nothing."
    ),
]
ColorOption = Annotated[
    bool,
    typer.Option("--color", help="Show which tokens the drafter proposed and the target kept."),
]


@dataclass(frozen=True)
class ModelChoice:
    """Which model to load, and how."""

    model: str | None
    target: str | None
    drafter: str | None
    mode: str | None
    device: str
    dtype: str
    engine: str = "native"
    quantize: str | None = None

    def load(self) -> Model:
        """Raises InvalidRequest as `check`."""
        from d3d.api import load

        name = self.check()
        return load(
            name,
            self.drafter,
            device=self.device,
            dtype=self.dtype,
            plain=self.mode == "plain",
            engine=self.engine,
            quantize=self.quantize,
        )

    def check(self) -> str:
        """The target's name. Raises InvalidRequest for options that contradict each other, before
        anything is fetched or read."""
        from d3d.api import MODES
        from d3d.errors import InvalidRequest
        from d3d.hub.preset_file import is_preset_file
        from d3d.hub.presets import PRESETS, find_preset

        for option, value in (
            ("--model", self.model),
            ("--target", self.target),
            ("--drafter", self.drafter),
        ):
            if value is not None and not value.strip():
                raise InvalidRequest(f"{option} is empty; name something, or leave it out")
        if self.mode is not None and self.mode not in MODES:
            raise InvalidRequest(f"mode: {self.mode!r} is not one of {', '.join(MODES)}")
        self._check_engine()
        if self.model is not None and self.target is not None:
            raise InvalidRequest("--model and --target both name a target; give one of them")
        if self.mode == "plain" and self.drafter is not None:
            raise InvalidRequest(
                "--mode plain uses no drafter; leave --drafter out, or use --mode serial"
            )
        name = self.target or self.model or DEFAULT_MODEL
        if self.target is None and not is_preset_file(name):
            find_preset(name)
        elif (
            self.mode in ("serial", "fused", "async")
            and self.drafter is None
            and name not in PRESETS
            and not is_preset_file(name)
        ):
            raise InvalidRequest(
                f"--mode {self.mode} needs a drafter for {name}; give one with --drafter, or use --mode plain"
            )
        return name

    def _check_engine(self) -> None:
        from d3d.api import ENGINES
        from d3d.errors import InvalidRequest

        if self.engine not in ENGINES:
            raise InvalidRequest(f"engine: {self.engine!r} is not one of {', '.join(ENGINES)}")
        if self.engine != "native" and self.mode in ("fused", "async"):
            raise InvalidRequest(
                f"--mode {self.mode} needs d3d's own engine; leave --engine out, or use --mode plain or serial"
            )
        if self.engine != "native" and self.quantize is not None:
            raise InvalidRequest(
                "--quantize needs d3d's own engine; leave --engine out, or --quantize"
            )


def note_speculation(result: GenerationResult) -> None:
    """On standard error: what auto mode has chosen and why, and what went wrong."""
    from d3d.cli.console import note

    if result.speculation is None:
        return
    if result.speculation.choice is not None:
        note(f"auto: {result.speculation.choice.why}")
    for warning in result.speculation.warnings:
        note(f"warning: {warning}", "yellow")


def show_dry_run(
    choice: ModelChoice, options: ModeOptions, max_tokens: int, *, as_json: bool
) -> None:
    """Print what would run where. Raises InvalidRequest, InvalidCheckpoint."""
    import json

    from d3d.cli.dry_run import dry_run, lines

    plan = dry_run(choice, options, max_tokens)
    typer.echo(json.dumps(plan) if as_json else "\n".join(lines(plan)))


def parse_logit_bias(pairs: list[str] | None) -> dict[int, float]:
    """ID:VALUE pairs. Raises InvalidRequest that shows the pair."""
    from d3d.errors import InvalidRequest

    bias: dict[int, float] = {}
    for pair in pairs or []:
        token_id, _, value = pair.partition(":")
        try:
            bias[int(token_id)] = float(value)
        except ValueError as error:
            raise InvalidRequest(f"--logit-bias {pair!r} is not ID:VALUE, such as 42:-5") from error
    return bias


def read_prompt(prompt: str, *, raw: bool) -> str:
    """The prompt itself, or for `-` standard input without its last newline. Raises InvalidRequest
    for an empty one."""
    import sys

    from d3d.api import check_prompt
    from d3d.errors import InvalidRequest

    if prompt == "-":
        try:
            prompt = sys.stdin.read().removesuffix("\n")
        except UnicodeDecodeError as error:
            raise InvalidRequest(f"standard input is not UTF-8 text ({error})") from error
    check_prompt(prompt, raw=raw)
    return prompt


def sampling_options(local: dict[str, Any]) -> dict[str, Any]:
    """The sampling parameters among a command's arguments. Raises InvalidRequest for an impossible
    one."""
    from d3d.api import sampling_params

    names = (
        "temperature",
        "top_k",
        "top_p",
        "min_p",
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
    )
    options = {
        name: local[name]
        for name in (*names, "min_tokens", "max_tokens", "seed", "logprobs")
        if name in local
    }
    for option, parameter in (("stop", "stop"), ("stop_token_id", "stop_token_ids")):
        if option in local:
            options[parameter] = tuple(local[option] or ())
    if "logit_bias" in local:
        options["logit_bias"] = parse_logit_bias(local["logit_bias"])
    sampling_params(options)
    return options


def check_trace(path: Path | None) -> None:
    """Raises InvalidRequest where no file can be written, before anything is computed."""
    from d3d.errors import InvalidRequest

    if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
        raise InvalidRequest(
            f"--trace {path}: there is no such directory, or it is one; name a file in a directory that exists"
        )


def traffic_log(path: Path | None, *, with_text: bool) -> TrafficLog | None:
    """Raises InvalidRequest where nothing can be recorded, before anything is computed."""
    from d3d.errors import InvalidRequest
    from d3d.lab.tune.traffic import TrafficLog

    if path is None:
        if with_text:
            raise InvalidRequest(
                "--record-text says what goes into the file of --record; name one, or leave it out"
            )
        return None
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise InvalidRequest(
            f"--record {path}: there is no such directory, or it is one; name a file in a directory that exists"
        )
    return TrafficLog(path, with_text)


def record_request(
    log: TrafficLog | None, model: Model, asked: TrafficRequest, result: GenerationResult
) -> None:
    """Where something is recorded; a warning where that fails."""
    from d3d.cli.console import note

    if log is not None and (problem := log.add(model, asked, result)):
        note(f"warning: {problem}", "yellow")


def write_trace(path: Path, result: GenerationResult, dtype: str) -> None:
    """With what d3d plan has to know to model the same rounds. Raises InvalidRequest where the file
    can't be written."""
    import json

    import torch

    from d3d.decoding.timeline import chrome_trace
    from d3d.errors import InvalidRequest

    about = {
        "mode": "plain" if result.speculation is None else result.speculation.mode,
        "dtype": dtype,
        "threads": torch.get_num_threads(),
        "prompt_tokens": result.usage.prompt_tokens,
        "tpot_s": result.timing.tpot_s,
    }
    try:
        path.write_text(json.dumps(chrome_trace(result.rounds, about)))
    except OSError as error:
        raise InvalidRequest(f"--trace {path} can't be written: {error}") from error


def thinking_warning(model: TargetModel, thinking: bool | None) -> str | None:
    """What to tell somebody who sets a switch that this model's chat template does not have."""
    from d3d.hub.chat import heeds_thinking

    if thinking is None or heeds_thinking(model.tokenizer):
        return None
    return f"warning: the chat template of {model.source} does not look at enable_thinking, so --thinking/--no-thinking changes nothing"
