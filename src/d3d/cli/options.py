"""Options that several commands share. Those of methods and sampling are generated from their
config classes, so that help, ranges and errors agree with behaviour."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from d3d.cli.groups import Group, option
from d3d.cli.groups import takes as takes
from d3d.config import METHODS, OPTION_ALIASES, OPTIONS, SpeculativeChoice, asked_method
from d3d.engine.params import SamplingParams
from d3d.errors import InvalidRequest

if TYPE_CHECKING:
    from d3d.api import Model

DEFAULT_MODEL = "smollm2-135m"

DeviceOption = Annotated[
    str, typer.Option(help="auto, cpu, cuda or cuda:N.", rich_help_panel="Model")
]
DTypeOption = Annotated[
    str, typer.Option(help="auto, float32 or bfloat16.", rich_help_panel="Model")
]
QuantizeOption = Annotated[
    str | None,
    typer.Option(
        help="int8: eight-bit weights of target and drafter, on a CPU with VNNI. The target then "
        "is another model.",
        rich_help_panel="Model",
    ),
]
BackendOption = Annotated[
    str,
    typer.Option(
        "--backend",
        "--engine",
        help="What runs the target: native; c: a C library on a CPU, float32 on the weights as "
        "stored (without fused and async); transformers: any causal language model (slower; "
        "without fused and async).",
        rich_help_panel="Model",
    ),
]
MaxTokensOption = Annotated[
    int, typer.Option(help="Longest answer in tokens.", rich_help_panel="Sampling")
]
ThinkingOption = Annotated[
    bool | None,
    typer.Option(
        "--thinking/--no-thinking",
        help="Passed to the chat template as enable_thinking.",
        rich_help_panel="Sampling, further",
    ),
]
TraceOption = Annotated[
    Path | None,
    typer.Option(
        help="Write a timeline of target and drafter as a Chrome trace (for Perfetto).",
        rich_help_panel="Output",
    ),
]
RecordOption = Annotated[
    Path | None,
    typer.Option(
        help="Add a line on this request to a file here: sampling, method, what each round kept; "
        "for d3d calibrate and tune.",
        rich_help_panel="Output",
    ),
]
RecordTextOption = Annotated[
    bool,
    typer.Option(
        "--record-text",
        help="With --record: the prompt's text, too. d3d tune needs it.",
        rich_help_panel="Output",
    ),
]
DryRunOption = Annotated[
    bool,
    typer.Option(
        "--dry-run",
        help="Show what would run, and on which device; load no weights, answer nothing.",
        rich_help_panel="Output",
    ),
]
ColorOption = Annotated[
    bool,
    typer.Option(
        "--color",
        help="Show which tokens the drafter proposed and the target kept.",
        rich_help_panel="Output",
    ),
]


# Sampling

BASIC = ("max_tokens", "temperature", "top_p", "seed", "draft_length", "lookup")
"""Options on the first screen of the help."""

FLAGS = {"stop_token_ids": "--stop-token-id"}
REPEATED = {
    "stop": (list[str] | None, "String that ends the answer; may be repeated."),
    "stop_token_ids": (list[int] | None, "Token id that ends the answer; may be repeated."),
    "logit_bias": (list[str] | None, "ID:VALUE, added to a token's logit; may be repeated."),
}


def sampling(*names: str, **defaults: Any) -> Group:
    """Sampling options of the given names; all of them if none is given."""
    parameters = []
    for name, field in SamplingParams.model_fields.items():
        if names and name not in names:
            continue
        flag = FLAGS.get(name, f"--{name.replace('_', '-')}")
        kind, text = REPEATED.get(name, (field.annotation, _sentence(field.description or "")))
        default = None if name in REPEATED else defaults.get(name, field.default)
        panel = "Sampling" if name in BASIC else "Sampling, further"
        parameters.append(option(name, kind, default, text, panel, flag))
    return Group("sampling", tuple(parameters), _sampling_options)


def _sampling_options(given: dict[str, Any]) -> dict[str, Any]:
    """Collect sampling options. Raises InvalidRequest for impossible ones."""
    from d3d.request_options import sampling_params

    options = dict(given)
    for name in ("stop", "stop_token_ids"):
        if name in options:
            options[name] = tuple(options[name] or ())
    if "logit_bias" in options:
        options["logit_bias"] = parse_logit_bias(options["logit_bias"])
    sampling_params(options)
    return options


def parse_logit_bias(pairs: list[str] | None) -> dict[int, float]:
    """Parse ID:VALUE pairs. Raises InvalidRequest naming the wrong pair."""
    bias: dict[int, float] = {}
    for pair in pairs or []:
        token_id, _, value = pair.partition(":")
        try:
            bias[int(token_id)] = float(value)
        except ValueError as error:
            raise InvalidRequest(f"--logit-bias {pair!r} is not ID:VALUE, such as 42:-5") from error
    return bias


# Methods

SHORT_FLAGS = {"num_denoise_steps": "--denoise-steps"}


def _method_parameters() -> list[inspect.Parameter]:
    summaries = "; ".join(f"{name}: {config.summary}" for name, config in METHODS.items())
    text = f"{summaries}. Default: the preset's, else serial with a drafter."
    parameters = [option("method", str | None, None, text, "Speculation", "--method", "--mode")]
    for name, methods in OPTIONS.items():
        field = METHODS[methods[0]].model_fields[name]
        owners = [method for method in methods if method != "auto"] or list(methods)
        flags = [SHORT_FLAGS[name]] if name in SHORT_FLAGS else []
        flags.append(f"--{name.replace('_', '-')}")
        if name == OPTION_ALIASES["num_speculative_tokens"]:
            flags.append("--num-speculative-tokens")
            owners = []
        panel = "Speculation" if name in BASIC else "Speculation, further"
        kind = {"float": float | None, "int": int | None}.get(_scalar(field.annotation), str | None)
        label = f"{', '.join(owners).capitalize()}: " if owners else ""
        parameters.append(option(name, kind, None, f"{label}{field.description}", panel, *flags))
    text = (
        "Method and options as JSON, in vLLM's words: method, num_speculative_tokens, model (the "
        "drafter), prompt_lookup_min, prompt_lookup_max, or any option here by name."
    )
    return [*parameters, option("speculative_config", str | None, None, text, "Speculation")]


def _scalar(annotation: Any) -> str:
    """Name of the number type of an optional field."""
    text = str(annotation)
    return next((name for name in ("float", "int") if f"{name} |" in f"{text} |"), "str")


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."


SPECULATION = Group("speculation", tuple(_method_parameters()), asked_method)


# Models


@dataclass(frozen=True)
class ModelChoice:
    """Model to load, and how."""

    model: str | None = None
    drafter: str | None = None
    device: str = "auto"
    dtype: str = "auto"
    backend: str = "native"
    quantize: str | None = None

    @property
    def name(self) -> str:
        return self.model or DEFAULT_MODEL

    def load(self, asked: SpeculativeChoice | None = None) -> Model:
        """Load the model. asked: the method, which may need no drafter, or name one. Raises
        InvalidRequest as `check`."""
        from d3d.loader import load

        drafter, draft_model = self.check(asked)
        method = None if asked is None else asked.method
        return load(
            self.name,
            drafter,
            device=self.device,
            dtype=self.dtype,
            plain=method in ("plain", "ngram"),
            backend=self.backend,
            quantize=self.quantize,
            draft_model=draft_model,
        )

    def check(self, asked: SpeculativeChoice | None) -> tuple[str | None, str | None]:
        """Names of the D3D drafter and of the causal draft model. Raises InvalidRequest for
        contradictory options, before anything is fetched or read."""
        from d3d.config import NEED_DRAFTER

        method = None if asked is None else asked.method
        named = None if asked is None else asked.drafter
        if named is not None and self.drafter is not None and named != self.drafter:
            raise InvalidRequest(
                f"--drafter {self.drafter} and the model {named} of --speculative-config are both "
                "named; give one of them"
            )
        drafter = self.drafter or named
        if method in ("plain", "ngram") and drafter is not None:
            raise InvalidRequest(
                f"--method {method} uses no drafter; leave --drafter out, or use --method serial"
            )
        if self.backend != "native" and self.quantize is not None:
            raise InvalidRequest(
                "--quantize needs d3d's own decoder; leave --backend out, or --quantize"
            )
        if self.backend != "native" and method in ("fused", "async"):
            raise InvalidRequest(
                f"--method {method} needs d3d's own decoder; leave --backend out, or use --method "
                "plain or serial"
            )
        if method == "draft_model" and drafter is not None:
            return None, drafter
        if method is None and named is not None:
            from d3d.loader import drafts_as_model

            if drafts_as_model(named, method):
                return None, named
        if method in NEED_DRAFTER and drafter is None and not _brings_one(self.name):
            raise InvalidRequest(
                f"--method {method} needs a drafter for {self.name}; give one with --drafter, or "
                "use --method plain or ngram"
            )
        return drafter, None


def _brings_one(model: str) -> bool:
    """True if a model's name may bring a drafter."""
    from d3d.hub.presets import PRESETS, is_preset_file

    return model in PRESETS or is_preset_file(model)


_TARGET_HELP = (
    "Target: preset, preset file, directory, GGUF file or hub id. A preset brings its drafter."
)


def _target_parameters(default: str | None) -> tuple[inspect.Parameter, ...]:
    text = _TARGET_HELP if default is None else f"{_TARGET_HELP} Default: {default}."
    return (
        option("model", str | None, None, text, "Model", "--model", "-m"),
        option("target", str | None, None, "Alias of --model.", "Model", hidden=True),
    )


def _one_target(given: dict[str, Any]) -> str | None:
    """Resolve --model and --target. Raises InvalidRequest for two different targets, or an empty
    name."""
    model, target = given["model"], given["target"]
    for flag, value in (("--model", model), ("--target", target)):
        if value is not None and not value.strip():
            raise InvalidRequest(f"{flag} is empty; name something, or leave it out")
    if model is not None and target is not None and model != target:
        raise InvalidRequest(
            f"--model {model} and --target {target} name two targets; give one of them"
        )
    name: str | None = model if model is not None else target
    return name


TARGET = Group("model", _target_parameters(None), _one_target)
"""Name of the target; None if it is not given."""


def _model_choice(given: dict[str, Any]) -> ModelChoice:
    if given["drafter"] is not None and not given["drafter"].strip():
        raise InvalidRequest("--drafter is empty; name something, or leave it out")
    names = ("drafter", "device", "dtype", "backend", "quantize")
    return ModelChoice(_one_target(given), **{name: given[name] for name in names})


def _annotated(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation
    )


MODEL = Group(
    "choice",
    (
        *_target_parameters(DEFAULT_MODEL),
        option(
            "drafter",
            str | None,
            None,
            "Drafter: directory or hub id; it replaces a preset's own.",
            "Model",
            "--drafter",
            "-d",
        ),
        _annotated("device", DeviceOption, "auto"),
        _annotated("dtype", DTypeOption, "auto"),
        _annotated("quantize", QuantizeOption, None),
        _annotated("backend", BackendOption, "native"),
    ),
    _model_choice,
)
"""A target, its drafter, and how they run."""
