"""`--dry-run`: show the plan of a run. Reads configs but no weights; refuses what the run itself
would refuse."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from d3d.cli.options import ModelChoice
from d3d.config import SpeculativeChoice, request_config
from d3d.errors import D3DError
from d3d.hub.checkpoint import DRAFT_IDS, SCALE, CheckpointConfig, read_config
from d3d.hub.footprint import footprint, model_config
from d3d.hub.names import is_here, resolve_drafter
from d3d.hub.open_model import WEIGHTS_FILE, pick_device, pick_dtype
from d3d.hub.presets import PRESETS, Preset
from d3d.loader import preset_of
from d3d.methods.async_.placement import available_cores
from d3d.methods.base import Facts, MethodConfig
from d3d.model.int8 import check_quantize, precision

NOT_HERE = "not on this machine yet; it would be fetched first"


@dataclass(frozen=True)
class Drafting:
    """Drafter as described by its checkpoint's config."""

    source: str
    path: Path
    config: CheckpointConfig
    num_target_layers: int
    backend: str
    """Backend of the target. Beside another, a drafter runs in d3d's own with its own
    weights."""

    @property
    def is_target(self) -> bool:
        """True if its clean rows can be the target's own: then they share weights and cache."""
        drafter = self.config.drafter
        is_whole = drafter.clean_rows_are_base and drafter.kept_layers == tuple(
            range(self.num_target_layers)
        )
        return is_whole and self.backend == "native"

    @property
    def kind(self) -> str:
        delta = self.config.drafter.delta
        return (
            "full weights" if delta is None else f"deltas of rank {delta.rank}, scope {delta.scope}"
        )

    def num_bytes(self, hidden_size: int, bytes_per_number: int, quantize: str | None) -> int:
        """Bytes that it adds to the target's weights, from its file's header: stored tensors, and
        those derived for drafting."""
        with safe_open(self.path / WEIGHTS_FILE, framework="pt") as file:
            names = [name for name in file.keys() if not name.endswith(SCALE)]  # noqa: SIM118 - not a mapping
            shapes = {
                name: torch.Size(file.get_slice(name).get_shape())
                for name in names
                if name != DRAFT_IDS
            }
        stored, drafter = sum(shape.numel() for shape in shapes.values()), self.config.drafter
        made = (drafter.draft_vocabulary or 0) * hidden_size  # rows of the head
        if drafter.anchor_slot:  # weights with their deltas merged
            layers = [name.removesuffix(".down") for name in shapes if name.endswith(".down")]
            made += sum(shapes[f"{name}.up"][0] * shapes[f"{name}.down"][1] for name in layers)
        return stored * bytes_per_number + made * (1 if quantize == "int8" else bytes_per_number)


def dry_run(choice: ModelChoice, asked: SpeculativeChoice, max_tokens: int) -> dict[str, Any]:
    """Plan of the run, as plain JSON values. Raises InvalidRequest and InvalidCheckpoint as the run
    would."""
    drafter, draft_model = choice.check(asked)
    name, preset = choice.name, preset_of(choice.name)
    preset_config: MethodConfig | None = None
    dtype_name, quantize, threads = choice.dtype, choice.quantize, torch.get_num_threads()
    if preset is not None:
        file, preset_config = preset
        name, drafter = file.target, drafter or file.drafter
        dtype_name = file.dtype if dtype_name == "auto" else dtype_name
        quantize, threads = quantize or file.quantize, file.threads or threads
    device = pick_device(choice.device)
    dtype = torch.float32 if choice.backend == "c" else pick_dtype(dtype_name, device)
    check_quantize(quantize, device)
    named = PRESETS.get(name) if drafter is None else None
    config = model_config(name) if is_here(name) or name not in PRESETS else None
    num_layers = 0 if config is None else config.num_hidden_layers
    drafting = None
    if asked.method not in ("plain", "ngram") and draft_model is None:
        drafting = _drafting(drafter, named, num_layers, choice.backend)
    chosen = request_config(
        preset_config,
        asked,
        has_drafter=drafting is not None,
        has_draft_model=draft_model is not None,
    )
    method = chosen.method
    facts = Facts(
        device,
        choice.backend == "native",
        None if drafting is None else drafting.config.drafter,
        drafting is not None and drafting.is_target,
        None if named is None else named.fused_rows,
        is_stored=True,
    )
    described = chosen.describe(facts)
    if method != "auto":
        described = {"modes": {method: described}, "left_out": {}}
    size = None
    if config is not None:
        size = _memory(name, config.hidden_size, drafting, dtype.itemsize, max_tokens, quantize)
    return {
        "target": {
            "source": name,
            "backend": choice.backend,
            "device": str(device),
            "dtype": str(dtype).removeprefix("torch."),
            "quantize": quantize,
        },
        "drafter": None if drafting is None else _about(drafting),
        "mode": method,
        **described,
        "cores": available_cores(),
        "threads": threads,
        "memory": size,
    }


def lines(plan: dict[str, Any]) -> Iterator[str]:
    """Plan of the run, as lines of text."""
    target, drafter, memory = plan["target"], plan["drafter"], plan["memory"]
    kind = precision(target["dtype"], target["quantize"])
    places = f"{kind} on {target['device']}, backend {target['backend']}"
    yield f"target     {target['source']}: {places}"
    if drafter is None:
        yield "drafter    none"
    else:
        shared = (
            "the target's weights and cache"
            if drafter["shares_target"]
            else "its own weights or cache"
        )
        kind = f"{drafter['kind']}, blocks of {drafter['block_size']}, {shared}"
        yield f"drafter    {drafter['source']}: {kind}"
    yield f"mode       {plan['mode']}"
    for name, options in plan["modes"].items():
        yield f"           {name}: " + (
            ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in options.items())
            or "nothing is drafted"
        )
    for name, reason in plan["left_out"].items():
        yield f"           {name} left out: {reason}"
    threads = "one thread" if plan["threads"] == 1 else f"{plan['threads']} threads"
    yield f"cores      {', '.join(map(str, plan['cores']))}; torch uses {threads}"
    if memory is None:
        yield f"memory     unknown: the target is {NOT_HERE}"
        return
    target_gb, drafter_gb = memory["target_bytes"] / 1e9, memory["drafter_bytes"] / 1e9
    sizes = f"target {target_gb:.2f} GB, drafter {drafter_gb:.2f} GB"
    yield f"memory     {sizes}, cache {memory['cache_bytes_per_token'] / 1e3:.0f} kB a token"


def _drafting(
    name: str | None, preset: Preset | None, num_layers: int, backend: str
) -> Drafting | None:
    if name is None and preset is None:
        return None
    path = (
        resolve_drafter(name)
        if name is not None
        else preset.drafter_directory()
        if preset is not None
        else Path()
    )
    config = read_config(path)
    if (
        not num_layers and preset is not None
    ):  # its target is not here; its drafter was made from it
        num_layers = len(config.drafter.kept_layers)
    return Drafting(
        name or f"the drafter of preset {preset.name if preset else ''}",
        path,
        config,
        num_layers,
        backend,
    )


def _about(drafting: Drafting) -> dict[str, Any]:
    config = drafting.config.drafter
    return {
        "source": drafting.source,
        "path": os.fspath(drafting.path),
        "kind": drafting.kind,
        "block_size": config.block_size,
        "layers": len(config.kept_layers),
        "base": drafting.config.base.source,
        "shares_target": drafting.is_target,
    }


def _memory(
    name: str,
    hidden_size: int,
    drafting: Drafting | None,
    bytes_per_number: int,
    max_tokens: int,
    quantize: str | None,
) -> dict[str, Any] | None:
    """Memory of this process, without activations and without a draft process's own copy."""
    try:
        size = footprint(name)
    except D3DError:
        return None
    fields = {
        "target_bytes": size.num_bytes(0, bytes_per_number, quantize),
        "drafter_bytes": 0
        if drafting is None
        else drafting.num_bytes(hidden_size, bytes_per_number, quantize),
        "cache_bytes_per_token": size.kv_per_token * bytes_per_number,
        "answer_cache_bytes": size.kv_per_token
        * bytes_per_number
        * min(max_tokens, size.max_length),
    }
    if (
        drafting is not None
        and drafting.backend != "native"
        and drafting.config.drafter.delta is not None
    ):
        fields["drafter_bytes"] += size.num_bytes(
            0, bytes_per_number
        )  # the deltas' base model is loaded a second time
    if drafting is not None and not drafting.is_target:
        layers = len(drafting.config.drafter.kept_layers) / max(1, drafting.num_target_layers)
        fields["drafter_cache_bytes_per_token"] = int(layers * fields["cache_bytes_per_token"])
    return fields
