"""`d3d.load`: open a `Model` from names."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from d3d.api import BACKENDS, Model
from d3d.config import SpeculativeChoice, preset_config, read_speculative_config, request_config
from d3d.errors import InvalidCheckpoint, InvalidRequest
from d3d.forks import set_num_threads
from d3d.hub.checkpoint import is_causal_model, read_config
from d3d.hub.names import drafter_of, fetch_config, is_hub_id, resolve_drafter
from d3d.hub.open_drafter import ready_apart, ready_drafters
from d3d.hub.open_model import open_model
from d3d.hub.presets import PRESETS, PresetFile, is_preset_file, read_preset
from d3d.inputs import input_path
from d3d.methods.base import MethodConfig, Parts
from d3d.model.linear import pack_weights
from d3d.target.native import NativeTarget


def preset_of(target: str) -> tuple[PresetFile, MethodConfig] | None:
    """Preset file with its method and options; None if `target` is no preset file. Raises
    InvalidCheckpoint if its options contradict each other."""
    if (
        target in PRESETS
        or not is_preset_file(target)
        or input_path(target, InvalidCheckpoint).is_dir()
    ):
        return None
    preset = read_preset(target)
    return preset, preset_config(preset, target)


def load(
    target: str,
    drafter: str | Path | None = None,
    *,
    device: str = "auto",
    dtype: str = "auto",
    plain: bool = False,
    backend: str = "native",
    quantize: str | None = None,
    draft_model: str | None = None,
    speculative_config: Mapping[str, Any] | str | None = None,
    engine: str | None = None,
) -> Model:
    """Load a target and its drafter.

    target: preset, preset file, directory, GGUF file or hub id. drafter: directory or hub id; a
    preset brings its own. plain: load no drafter. device: auto, cpu, cuda or cuda:N. dtype: auto,
    float32 or bfloat16. backend: "native" runs the target in d3d's own decoder; "c" in the C
    library, on a CPU, in float32 on the weights as stored; "transformers" runs
    any causal language model that can be rewound, slower and without fused and async mode.
    quantize: "int8" rounds the linear weights of both models; every method then preserves the
    rounded target's output. draft_model: causal model that drafts (method draft_model).
    speculative_config: default method and options of requests, in vLLM's format; its key `model`
    names the drafter, and without a method the drafter's kind decides: a causal model drafts by
    draft_model. engine: alias of backend. Raises InvalidCheckpoint or InvalidRequest.

    A preset file also sets the default method and options, the dtype if `dtype` is auto, `quantize`
    if it is None, and the number of threads, which is torch's process-wide setting."""
    choice = SpeculativeChoice(None, {}, None)
    if speculative_config is not None:
        choice = read_speculative_config(speculative_config)
        drafter, draft_model = _named_once(drafter, draft_model, choice)
    backend = _one_backend(backend, engine)
    if drafter is not None and draft_model is not None:
        raise InvalidRequest(
            f"draft_model: {draft_model} and the drafter {drafter} are both named; give one of them"
        )
    plain = plain or draft_model is not None
    if plain and drafter is not None:
        raise InvalidRequest("plain: no drafter is loaded; leave the drafter out, or plain")
    preset = preset_of(target)
    path = _drafter_path(target, drafter, plain=plain)
    if backend == "c" and path is None and dtype == "bfloat16":
        raise InvalidRequest("dtype: backend c computes in float32, not in bfloat16; leave it out")
    has_own = drafter is None
    config = None if preset is None else preset[1]
    if choice.method is not None or choice.options:
        config = request_config(
            config, choice, has_drafter=path is not None, has_draft_model=draft_model is not None
        )
    if preset is not None:
        file = preset[0]
        target, dtype = file.target, file.dtype if dtype == "auto" else dtype
        quantize = file.quantize if quantize is None else quantize
        has_own = has_own and file.drafter is None
        if file.threads is not None:
            set_num_threads(file.threads)
    opened = {"native": _native, "c": _compiled, "transformers": _with_transformers}[backend]
    parts = opened(target, path, device=device, dtype=dtype, quantize=quantize)
    if has_own and target in PRESETS:
        parts.preset_rows = PRESETS[target].fused_rows
    if draft_model is not None:
        parts.draft_model = open_model(draft_model, device=device, dtype=dtype, quantize=quantize)
        pack_weights(parts.draft_model.transformer, quantize=quantize)
    return Model(parts, preset=config, backend=backend)


def _one_backend(backend: str, engine: str | None) -> str:
    """The backend, which `engine` may name too. Raises InvalidRequest."""
    if engine is not None and backend not in ("native", engine):
        raise InvalidRequest(f"backend: {backend!r} and engine: {engine!r} are one option")
    if (engine or backend) not in BACKENDS:
        raise InvalidRequest(f"backend: {engine or backend!r} is not one of {', '.join(BACKENDS)}")
    return engine or backend


def _drafter_path(target: str, drafter: str | Path | None, *, plain: bool) -> Path | None:
    """Path of the drafter's checkpoint. Refuses anything else before the target is fetched and
    read."""
    path = None
    if drafter is not None:
        path = resolve_drafter(str(drafter)).absolute()
    elif not plain:
        path = drafter_of(target)
    if path is not None:
        read_config(path)
    return path


def drafts_as_model(name: str, method: str | None) -> bool:
    """True if a named drafter is a causal model for method draft_model: by the method, else by its
    kind. Of a hub id the config is fetched. Raises InvalidCheckpoint."""
    if method is not None or name in PRESETS or is_preset_file(name):
        return method == "draft_model"
    path = input_path(name, InvalidCheckpoint)
    return is_causal_model(fetch_config(name) if is_hub_id(name) and not path.exists() else path)


def _named_once(
    drafter: str | Path | None, draft_model: str | None, choice: SpeculativeChoice
) -> tuple[str | Path | None, str | None]:
    """Drafter and draft model, one of which `speculative_config` may name. Raises InvalidRequest if
    two different ones are named."""
    name = choice.drafter
    if name is None:
        return drafter, draft_model
    is_causal = drafts_as_model(name, choice.method)
    given = draft_model if is_causal else drafter
    if given is not None and str(given) != name:
        raise InvalidRequest(
            f"speculative_config: model: {name} and the drafter {given} are both named"
        )
    return (drafter, name) if is_causal else (name, draft_model)


def _native(
    target: str, drafter: Path | None, *, device: str, dtype: str, quantize: str | None
) -> Parts:
    model = open_model(target, device=device, dtype=dtype, quantize=quantize)
    native = NativeTarget(model.transformer)
    if drafter is None:
        pack_weights(model.transformer, quantize=quantize)
        return Parts(model, native)
    (drafter_model,) = ready_drafters(model, [drafter])
    return Parts(model, native, drafter_model, drafter)


def _compiled(
    target: str, drafter: Path | None, *, device: str, dtype: str, quantize: str | None
) -> Parts:
    """Run the target in the C library; a drafter runs in torch, in `dtype`, with its own cache."""
    from d3d.target.compiled import CompiledTarget, open_compiled

    if quantize is not None:
        raise InvalidRequest("quantize: backend c runs the weights as stored; leave it out")
    if device not in ("auto", "cpu"):
        raise InvalidRequest(f"device: backend c runs on a CPU, not on {device}; leave it out")
    model = open_compiled(target)
    drafter_model = None
    if drafter is not None:
        drafter_model = ready_apart(open_model(target, device="cpu", dtype=dtype), drafter)
    return Parts(model, CompiledTarget(model.passes), drafter_model, drafter)


def _with_transformers(
    target: str, drafter: Path | None, *, device: str, dtype: str, quantize: str | None
) -> Parts:
    """Run the target with `transformers`; a drafter runs in d3d's own decoder, with its own weights
    and cache."""
    from d3d.target.transformers import TransformersTarget, open_transformers

    if quantize is not None:
        raise InvalidRequest(
            "quantize: only d3d's own decoder rounds weights; leave it out, or use backend native"
        )
    model = open_transformers(target, device=device, dtype=dtype)
    drafter_model = None if drafter is None else ready_apart(model, drafter)
    return Parts(model, TransformersTarget(model), drafter_model, drafter)
