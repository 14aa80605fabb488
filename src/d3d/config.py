"""Decoding methods: one config class each, and the option names that users know."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from difflib import get_close_matches
from typing import Annotated, Any, NamedTuple, get_args

from pydantic import Field, TypeAdapter, ValidationError

from d3d.errors import InvalidCheckpoint, InvalidRequest, first_problem
from d3d.hub.presets import PresetFile
from d3d.inputs import parse_json
from d3d.methods.async_.config import AsyncConfig
from d3d.methods.auto.config import AutoConfig
from d3d.methods.base import MethodConfig, no_drafter
from d3d.methods.draft_model.config import DraftModelConfig
from d3d.methods.fused.config import FusedConfig
from d3d.methods.ngram.config import NgramConfig
from d3d.methods.plain.config import PlainConfig
from d3d.methods.serial.config import SerialConfig

SpecConfig = Annotated[
    PlainConfig
    | SerialConfig
    | FusedConfig
    | AsyncConfig
    | AutoConfig
    | NgramConfig
    | DraftModelConfig,
    Field(discriminator="method"),
]
"""Speculation options of a request, discriminated by method."""

METHODS: dict[str, type[MethodConfig]] = {
    config.model_fields["method"].default: config for config in get_args(get_args(SpecConfig)[0])
}
METHOD_ALIASES = {"lookup": "ngram", "prompt_lookup": "ngram"}

OPTIONS: dict[str, tuple[str, ...]] = {}
"""Option name to the methods that have it."""
for _method, _config in METHODS.items():
    for _name in _config.model_fields:
        if _name != "method":
            OPTIONS[_name] = (*OPTIONS.get(_name, ()), _method)

OPTION_ALIASES = {
    "num_speculative_tokens": "draft_length",
    "num_assistant_tokens": "draft_length",
    "assistant_confidence_threshold": "draft_confidence",
}
"""Option names of vLLM and transformers."""

OFF = {"lookup": 0, "least_kept": 0}
"""Values that switch an option off; every method accepts them."""

SHARED_WITH_AUTO = ("draft_confidence", "lookup", "least_kept")
"""Options of a serial preset that auto mode takes over: those that skip drafts."""

_ADAPTER: TypeAdapter[MethodConfig] = TypeAdapter(SpecConfig)


NEED_DRAFTER = ("serial", "fused", "async", "draft_model")
"""Methods that can't do without a drafter."""


class SpeculativeChoice(NamedTuple):
    """Parsed `--speculative-config`."""

    method: str | None
    options: dict[str, Any]
    drafter: str | None
    """Value of its key `model`."""


def spec_config(method: str, options: Mapping[str, Any]) -> MethodConfig:
    """Build the config of a method; None means the method's default. Raises InvalidRequest for the
    first option that is unknown, belongs to another method, or has an impossible value."""
    method = METHOD_ALIASES.get(method, method)
    if method not in METHODS:
        raise InvalidRequest(f"method: {method!r} is not one of {', '.join(METHODS)}")
    fields = canonical(options)
    known = METHODS[method].model_fields
    for name, value in list(fields.items()):
        if name in known:
            continue
        if value is None or (name in OFF and value == OFF[name]):
            del fields[name]
        elif name in OPTIONS:
            *others, last = OPTIONS[name]
            owners = f"{', '.join(others)} or {last}" if others else last
            raise InvalidRequest(
                f"{name}: method {method} has no such option; leave it out, or use {owners}"
            )
    try:
        return _ADAPTER.validate_python({"method": method, **fields}, strict=True)
    except ValidationError as error:
        problem = first_problem(error, sorted(known.keys() - {"method"}))
        raise InvalidRequest(problem.removeprefix(f"{method}.")) from error


def canonical(options: Mapping[str, Any]) -> dict[str, Any]:
    """Rename options to d3d's names. Raises InvalidRequest if one option has two different
    values."""
    fields: dict[str, Any] = {}
    for name, value in options.items():
        ours = OPTION_ALIASES.get(name, name)
        if value is None:
            fields.setdefault(ours, None)
        elif fields.get(ours) is not None and fields[ours] != value:
            raise InvalidRequest(f"{name}: {value} and {ours}: {fields[ours]} are one option")
        else:
            fields[ours] = value
    return fields


def read_speculative_config(value: str | Mapping[str, Any]) -> SpeculativeChoice:
    """Parse a `--speculative-config`, as JSON or a dict.

    Keys: vLLM's method, model (the drafter), num_speculative_tokens, prompt_lookup_min and
    prompt_lookup_max, and d3d's own options. Raises InvalidRequest if it is no object or has an
    unknown key."""
    where = "speculative_config"
    if isinstance(value, str):
        value = parse_json(value, where)
    if not isinstance(value, Mapping):
        raise InvalidRequest(f"{where}: give an object, not {type(value).__name__}")
    fields = dict(value)
    method, drafter = fields.pop("method", None), fields.pop("model", None)
    for name, text in (("method", method), ("model", drafter)):
        if text is not None and not (isinstance(text, str) and text.strip()):
            raise InvalidRequest(f"{where}: {name}: {text!r} is not a name")
    if drafter is not None and method is not None and method in ("ngram", *METHOD_ALIASES):
        raise InvalidRequest(f"{where}: model: method {method} needs no drafter; leave it out")
    known = OPTIONS.keys() | OPTION_ALIASES.keys()
    for name in fields:
        if name not in known:
            raise InvalidRequest(
                f"{where}: there is no key {name!r}; there are: method, model, "
                f"{', '.join(sorted(known))}{_nearest(str(name), known)}"
            )
    if method is None and {"prompt_lookup_min", "prompt_lookup_max"} & fields.keys():
        method = "ngram"
    return SpeculativeChoice(METHOD_ALIASES.get(method, method), canonical(fields), drafter)


def _nearest(name: str, known: Collection[str]) -> str:
    """The key that was probably meant, as a question; empty if none is near."""
    near = get_close_matches(name, ["method", "model", *sorted(known)], n=1)
    return f". Did you mean {near[0]!r}?" if near else ""


def asked_method(options: Mapping[str, Any]) -> SpeculativeChoice:
    """Method (None if unspecified) and options of a request, in any of their spellings. Raises
    InvalidRequest for contradictions."""
    fields = {name: value for name, value in options.items() if value is not None}
    given = SpeculativeChoice(None, {}, None)
    if (config := fields.pop("speculative_config", None)) is not None:
        given = read_speculative_config(config)
    if (num_tokens := fields.pop("prompt_lookup_num_tokens", None)) is not None:
        given = given._replace(
            method=given.method or "ngram",
            options=canonical_pairs(given.options, {"draft_length": num_tokens}),
        )
    names = [fields.pop("method", None), fields.pop("mode", None), given.method]
    for name in names:
        if name is not None and not isinstance(name, str):
            raise InvalidRequest(f"method: {name!r} is not a name")
    methods = list(
        dict.fromkeys(METHOD_ALIASES.get(name, name) for name in names if name is not None)
    )
    if len(methods) > 1:
        raise InvalidRequest(f"method: {methods[0]!r} and {methods[1]!r} are both asked for")
    method = methods[0] if methods else None
    if method is not None and method not in METHODS:
        raise InvalidRequest(f"method: {method!r} is not one of {', '.join(METHODS)}")
    return SpeculativeChoice(method, canonical_pairs(given.options, fields), given.drafter)


def canonical_pairs(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """Merge two sets of options under d3d's names, without unset ones.

    Raises InvalidRequest if they contradict."""
    ours, theirs = (
        {name: value for name, value in canonical(options).items() if value is not None}
        for options in (first, second)
    )
    for name in ours.keys() & theirs.keys():
        if ours[name] != theirs[name]:
            raise InvalidRequest(
                f"{name}: {ours[name]} in speculative_config and {theirs[name]} are both asked for"
            )
    return {**ours, **theirs}


def preset_config(preset: PresetFile, source: str) -> MethodConfig:
    """Method and options of a preset file. Raises InvalidCheckpoint."""
    try:
        return spec_config(preset.mode, preset.options)
    except InvalidRequest as error:
        raise InvalidCheckpoint(f"preset {source}: {error}") from error


def usual_method(
    preset: MethodConfig | None, *, has_drafter: bool, has_draft_model: bool = False
) -> str:
    """Default method: the preset's, else serial if there is a D3D drafter, draft_model if there is
    only a causal one."""
    if preset is not None and (has_drafter or preset.method in ("plain", "ngram")):
        return preset.method
    return "serial" if has_drafter else "draft_model" if has_draft_model else "plain"


def request_config(
    preset: MethodConfig | None,
    asked: SpeculativeChoice,
    *,
    has_drafter: bool,
    has_draft_model: bool = False,
) -> MethodConfig:
    """Config of a request: its own options, completed from a preset of the same method. Auto mode
    also takes a serial preset's options that skip drafts. asked: see `asked_method`; has_drafter,
    has_draft_model: whether there is a D3D drafter, or a causal one. Raises InvalidRequest."""
    method = asked.method or usual_method(
        preset, has_drafter=has_drafter, has_draft_model=has_draft_model
    )
    has_needed = has_drafter or (has_draft_model and method == "draft_model")
    if method in NEED_DRAFTER and not has_needed:
        raise no_drafter(method)
    fields = {name: value for name, value in asked.options.items() if value is not None}
    if preset is not None:
        names: tuple[str, ...] = ()
        if preset.method == method:
            names = tuple(type(preset).model_fields.keys() - {"method"})
        elif (method, preset.method) == ("auto", "serial") and (has_drafter or has_draft_model):
            names = SHARED_WITH_AUTO
        for name in names:
            if getattr(preset, name) is not None:
                fields.setdefault(name, getattr(preset, name))
    return spec_config(method, fields)
