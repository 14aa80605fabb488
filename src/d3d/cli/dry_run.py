"""`--dry-run`: what would run where. Configs are read and no weights; what is impossible is refused
as the run itself would refuse it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import torch
from safetensors import safe_open

from d3d.decoding import modes as m
from d3d.decoding.auto_modes import USUAL_ROWS, refuse_options_of
from d3d.decoding.preset_choices import choices_of, filled_in, usual_mode
from d3d.drafting.fused import check_fused_config
from d3d.errors import D3DError, InvalidRequest
from d3d.hub.checkpoint import DRAFT_IDS, SCALE, CheckpointConfig, read_config
from d3d.hub.footprint import footprint, model_config
from d3d.hub.names import is_here, resolve_drafter
from d3d.hub.open_model import WEIGHTS_FILE, pick_device, pick_dtype
from d3d.hub.presets import PRESETS, Preset
from d3d.methods.async_.auto_placement import room_for_worker
from d3d.methods.async_.coordinator import MissPolicy
from d3d.methods.async_.placement import (
    available_cores,
    check_placement,
    default_placement,
    worker_cores,
)
from d3d.model.int8 import check_quantize, precision

if TYPE_CHECKING:
    from d3d.cli.options import ModelChoice

NOT_HERE = "not on this machine yet; it would be fetched first"


@dataclass(frozen=True)
class Drafting:
    """The drafter, by its checkpoint's config."""

    source: str
    path: Path
    config: CheckpointConfig
    num_target_layers: int
    engine: str
    """The target's. A drafter runs in d3d's own, beside another with weights of its own."""

    @property
    def is_target(self) -> bool:
        """Whether its clean rows can be the target's own: then they share weights and cache."""
        drafter = self.config.drafter
        is_whole = drafter.clean_rows_are_base and drafter.kept_layers == tuple(
            range(self.num_target_layers)
        )
        return is_whole and self.engine == "native"

    @property
    def kind(self) -> str:
        delta = self.config.drafter.delta
        return (
            "full weights" if delta is None else f"deltas of rank {delta.rank}, scope {delta.scope}"
        )

    def num_bytes(self, hidden_size: int, bytes_per_number: int, quantize: str | None) -> int:
        """What it adds to the target's weights, by the header of its file: what that holds, and
        what is made of it to draft."""
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


def dry_run(choice: ModelChoice, options: m.ModeOptions, max_tokens: int) -> dict[str, Any]:
    """What would run, as plain JSON values. Raises InvalidRequest and InvalidCheckpoint as the run
    would."""
    name, drafter = choice.check(), choice.drafter
    choices = choices_of(name)
    if choices is not None:
        name, drafter = choices.target, drafter or choices.drafter
    device = pick_device(choice.device)
    dtype = pick_dtype(
        choices.dtype if choices is not None and choice.dtype == "auto" else choice.dtype, device
    )
    quantize = choice.quantize or (None if choices is None else choices.quantize)
    check_quantize(quantize, device)
    preset = PRESETS.get(name) if drafter is None else None
    config = model_config(name) if is_here(name) or name not in PRESETS else None
    num_layers = 0 if config is None else config.num_hidden_layers
    drafting = (
        None if choice.mode == "plain" else _drafting(drafter, preset, num_layers, choice.engine)
    )
    mode = choice.mode or usual_mode(choices, has_drafter=drafting is not None)
    plan = _Plan(
        filled_in(choices, mode, options, has_drafter=drafting is not None),
        drafting,
        device,
        preset,
        choice.engine,
    )
    cores = available_cores()
    return {
        "target": {
            "source": name,
            "engine": choice.engine,
            "device": str(device),
            "dtype": str(dtype).removeprefix("torch."),
            "quantize": quantize,
        },
        "drafter": None if drafting is None else _about(drafting),
        "mode": mode,
        **(plan.auto() if mode == "auto" else plan.of(mode)),
        "cores": cores,
        "threads": torch.get_num_threads()
        if choices is None or choices.threads is None
        else choices.threads,
        "memory": None
        if config is None
        else _memory(name, config.hidden_size, drafting, dtype.itemsize, max_tokens, quantize),
    }


def lines(plan: dict[str, Any]) -> Iterator[str]:
    """The same for people."""
    target, drafter, memory = plan["target"], plan["drafter"], plan["memory"]
    kind = precision(target["dtype"], target["quantize"])
    yield f"target     {target['source']}: {kind} on {target['device']}, engine {target['engine']}"
    if drafter is None:
        yield "drafter    none"
    else:
        shared = (
            "the target's weights and cache"
            if drafter["shares_target"]
            else "its own weights or cache"
        )
        yield f"drafter    {drafter['source']}: {drafter['kind']}, blocks of {drafter['block_size']}, {shared}"
    yield f"mode       {plan['mode']}"
    for name, one in plan["modes"].items():
        yield f"           {name}: " + (
            ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in one.items())
            or "nothing is drafted"
        )
    for name, reason in plan["left_out"].items():
        yield f"           {name} left out: {reason}"
    threads = "one thread" if plan["threads"] == 1 else f"{plan['threads']} threads"
    yield f"cores      {', '.join(map(str, plan['cores']))}; torch uses {threads}"
    if memory is None:
        yield f"memory     unknown: the target is {NOT_HERE}"
        return
    sizes = f"target {memory['target_bytes'] / 1e9:.2f} GB, drafter {memory['drafter_bytes'] / 1e9:.2f} GB"
    yield f"memory     {sizes}, cache {memory['cache_bytes_per_token'] / 1e3:.0f} kB a token"


@dataclass(frozen=True)
class _Plan:
    """Modes by what is known without weights."""

    options: m.ModeOptions
    drafting: Drafting | None
    device: torch.device
    preset: Preset | None
    engine: str

    def of(self, mode: str) -> dict[str, Any]:
        """The one mode. Raises InvalidRequest where it is not to be had, or an option means nothing
        in it."""
        m.refuse_foreign(mode, self.options)
        return {"modes": {mode: self._mode(mode, None)}, "left_out": {}}

    def auto(self) -> dict[str, Any]:
        """What auto mode would try."""
        room = room_for_worker(self.device, len(available_cores()), is_stored=True)
        found: dict[str, dict[str, Any]] = {"plain": {}}
        left_out: dict[str, str] = {}
        if self.drafting is None:
            left_out = dict.fromkeys(("serial", "fused", "async"), "there is no drafter")
        else:
            found["serial"] = self._mode("serial", None)
            for mode, placement in (
                ("fused", None),
                ("async", self.options.placement or room.placement),
            ):
                try:
                    if mode == "async" and placement is None:
                        raise InvalidRequest(room.reason)
                    found[mode] = self._mode(mode, placement)
                except InvalidRequest as error:
                    left_out[mode] = str(error).removeprefix("mode: ")
        refuse_options_of(left_out, self.options)
        return {"modes": found, "left_out": left_out}

    def _mode(self, mode: str, placement: str | None) -> dict[str, Any]:
        if mode == "plain":
            return {}
        if self.drafting is None:
            raise InvalidRequest(
                f"mode: {mode} needs a drafter, and there is none; name one with --drafter, or use plain"
            )
        if mode in ("fused", "async") and self.engine != "native":
            raise InvalidRequest(f"mode: {mode} needs d3d's own engine to run the target")
        config, options = self.drafting.config.drafter, self.options
        if mode == "fused":
            check_fused_config(config, clean_rows_are_targets=self.drafting.is_target)
            preset = None if self.preset is None else self.preset.fused_rows
            rows = (
                m.checked_rows(options.rows)
                or preset
                or f"{USUAL_ROWS} in auto mode, else measured at the start"
            )
            lookup = m.checked_lookup(options.lookup)
            length = m.checked_fused_length(options.draft_length, config.longest_slot_draft, lookup)
            return {"draft_length": length, "rows": rows} | ({"lookup": lookup} if lookup else {})
        length = m.checked_draft_length(
            options.draft_length, config.block_size, m.DEFAULT_DRAFT_LENGTH
        )
        if mode == "serial":
            steps = {
                "draft_length": length,
                "denoise_steps": m.checked_steps(options.num_denoise_steps, length),
            }
            told = {
                "draft_confidence": m.checked_confidence(options.draft_confidence),
                "lookup": m.checked_lookup(options.lookup) or None,
                "least_kept": m.checked_least_kept(options.least_kept) or None,
            }
            return steps | {name: value for name, value in told.items() if value is not None}
        return {
            "draft_length": length,
            "outcomes": m.checked_outcomes(options.outcomes),
        } | self._worker(placement)

    def _worker(self, placement: str | None) -> dict[str, Any]:
        policy, where = (
            self.options.miss_policy or "draft_now",
            placement or self.options.placement or default_placement(self.device),
        )
        if policy not in get_args(MissPolicy):
            raise InvalidRequest(
                f"miss policy: {policy!r} is not one of {', '.join(get_args(MissPolicy))}"
            )
        check_placement(where, self.device)
        fields: dict[str, Any] = {"miss_policy": policy, "placement": where}
        cores = available_cores()
        if where == "processes":
            fields["worker_cores"] = worker_cores(cores)
        if self.device.type == "cpu":
            left = len(cores) - (
                len(fields["worker_cores"]) if where == "processes" else 1
            )  # a draft thread has one
            fields["target_threads"] = max(1, min(torch.get_num_threads(), left))
        return fields


def _drafting(
    name: str | None, preset: Preset | None, num_layers: int, engine: str
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
    ):  # its target is not here to be asked, and its drafter was made of it
        num_layers = len(config.drafter.kept_layers)
    return Drafting(
        name or f"the drafter of preset {preset.name if preset else ''}",
        path,
        config,
        num_layers,
        engine,
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
    """Of this process, without what a draft process would load again, and without activations."""
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
        and drafting.engine != "native"
        and drafting.config.drafter.delta is not None
    ):
        fields["drafter_bytes"] += size.num_bytes(
            0, bytes_per_number
        )  # what the deltas belong to is loaded a second time
    if drafting is not None and not drafting.is_target:
        layers = len(drafting.config.drafter.kept_layers) / max(1, drafting.num_target_layers)
        fields["drafter_cache_bytes_per_token"] = int(layers * fields["cache_bytes_per_token"])
    return fields
