"""`d3d tune` without its command line: from a target, drafters and prompts to a preset file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from d3d.api import Model
from d3d.core.types import SamplingParams
from d3d.errors import InvalidRequest
from d3d.files import alone_in
from d3d.hub.checkpoint import read_config
from d3d.hub.names import drafter_of, resolve_drafter
from d3d.hub.open_drafter import ready_drafters
from d3d.hub.open_model import open_model
from d3d.hub.presets import (
    PRESETS,
    AnswerRounds,
    PresetFile,
    Tuned,
    is_preset_file,
    read_preset,
    write_preset,
)
from d3d.lab.tune.confirm import Confirmation, Confirmed, finalists, with_plain
from d3d.lab.tune.measure import Case, LoopMeasurer, Measurer
from d3d.lab.tune.prompts import Split, TuningPrompts, grouped, split
from d3d.lab.tune.search import Search, SearchPlan, Stop
from d3d.lab.tune.setups import OWN, DrafterFacts, Setup, Space
from d3d.loader import load
from d3d.machine import machine, processor, versions
from d3d.methods.async_.placement import available_cores, default_placement
from d3d.methods.fused.engine import check_fused
from d3d.methods.serial.drafter import BlockDrafter
from d3d.target.native import NativeEngine

JOURNAL, CONFIRMED, PRESET = "search.log", "confirmed.jsonl", "preset.yaml"
TOLD_OF_MACHINE = ("processor", "cores", "gpus", "platform")


@dataclass(frozen=True)
class TunePlan:
    """What is tuned for, and how long."""

    directory: Path
    prompts: TuningPrompts
    sampling: SamplingParams
    """Its max_tokens, too."""
    concurrency: int = 1
    trials: int = 40
    finalists: int = 3
    seed: int = 0

    @property
    def cases(self) -> list[Case]:
        return [list(case) for case in grouped(self.prompts.token_ids, self.concurrency)]


class Progress(Protocol):
    """Shows how far a stage has come."""

    def show(self, completed: int, text: str) -> None: ...


Metering = Callable[[int], AbstractContextManager[Progress]]
"""Progress towards a total."""


class Outcome(NamedTuple):
    """What tuning came to."""

    preset: Path
    judged: list[Confirmed]
    """The fastest first."""
    split: Split
    default: Setup


def open_models(
    target: str, drafters: Sequence[str], *, device: str, dtype: str, quantize: str | None = None
) -> dict[str, Model]:
    """Models of one target with another drafter each, by the drafter's name; without any the
    target's own, which is OWN.

    What a preset file says of decoding is left out: it is looked for anew; rounded weights are
    another target, and stay. Raises InvalidRequest where there is no drafter at all,
    InvalidCheckpoint for what is none."""
    if not drafters:
        before = torch.get_num_threads()
        model = load(target, device=device, dtype=dtype, quantize=quantize)
        torch.set_num_threads(before)
        if model.drafter is None:
            raise InvalidRequest(
                f"there is no drafter to tune for {target}: name one or more with --drafter, or a preset with --model"
            )
        return {OWN: replace(model, choices=None, drafter_path=drafter_of(target))}
    paths = {name: resolve_drafter(name) for name in drafters}
    for path in paths.values():
        read_config(path)
    if is_preset_file(target):
        target, quantize = (said := read_preset(target)).target, quantize or said.quantize
    base = open_model(target, device=device, dtype=dtype, quantize=quantize)
    engine = NativeEngine(base.transformer)
    ready = ready_drafters(base, list(paths.values()))
    return {
        name: Model(base, engine, BlockDrafter(drafter, engine.vocab_size), drafter_path=path)
        for (name, path), drafter in zip(paths.items(), ready, strict=True)
    }


def space_of(models: dict[str, Model], modes: Sequence[str], threads: Sequence[int]) -> Space:
    """What these drafters can do here. `modes`: empty for all. Raises InvalidRequest where nothing
    is left."""
    device = next(iter(models.values())).target.device
    on_cpu, cores = device.type == "cpu", len(available_cores())
    wanted = tuple(modes) or (("serial", "fused", "async") if cores > 1 else ("serial", "fused"))
    facts = tuple(_facts(name, model) for name, model in models.items())
    space = Space(
        wanted, facts, _thread_choices(threads, cores) if on_cpu else (), placements(device, cores)
    )
    if not space.ways:
        raise InvalidRequest(
            f"mode: {', '.join(wanted)} is nothing that these drafters can do; leave --mode out, or name serial"
        )
    return space


def placements(device: torch.device, cores: int) -> tuple[str, ...]:
    """Of async mode's draft worker beside a target on this device, the default first."""
    if device.type == "cpu":
        return ("thread", "processes") if cores > 1 else ("thread",)
    return tuple(dict.fromkeys((default_placement(device), "streams", "thread")))


def _facts(name: str, model: Model) -> DrafterFacts:
    assert model.drafter is not None
    assert isinstance(model.engine, NativeEngine)
    drafter, longest = model.drafter.model, 0
    try:
        check_fused(drafter, model.engine.model)
        longest = drafter.config.longest_slot_draft
    except InvalidRequest:
        pass  # it has no fused mode
    return DrafterFacts(name, drafter.config.block_size, longest)


def _thread_choices(given: Sequence[int], cores: int) -> tuple[int, ...]:
    """Powers of two up to the cores, and what torch takes by itself."""
    doubled = [2**power for power in range(cores.bit_length()) if 2**power <= cores]
    return tuple(sorted({*(given or doubled), torch.get_num_threads()}))


def tune(
    plan: TunePlan, models: dict[str, Model], space: Space, meter: Metering, stop: Stop
) -> Outcome | None:
    """Search, confirm, and write the preset; `meter` shows how far each of the two has come. None
    where `stop` said so before. What has been measured stays, and is not measured again.

    Raises InvalidRequest where the directory holds another search or another process is at work in
    it."""
    measurer = LoopMeasurer(models, plan.cases, plan.sampling)
    try:
        with alone_in(plan.directory, "d3d tune"):
            return run(plan, models, space, measurer, meter, stop)
    finally:
        measurer.close()


def run(
    plan: TunePlan,
    models: dict[str, Model],
    space: Space,
    measure: Measurer,
    meter: Metering,
    stop: Stop,
) -> Outcome | None:
    """`tune` with measurements of any origin."""
    parts = split(len(plan.cases))
    threads = torch.get_num_threads()
    search = Search(
        plan.directory / JOURNAL,
        SearchPlan(space, parts.search, plan.trials, plan.seed, threads, _identity(plan, models)),
    )
    with meter(plan.trials) as progress:
        if not search.run(measure, progress.show, stop):
            return None
    setups = with_plain(finalists(search.best(), plan.finalists, search.default))
    confirmation = Confirmation(plan.directory / CONFIRMED, setups, parts.confirm)
    with meter(confirmation.total) as progress:
        judged = confirmation.run(measure, progress.show, stop)
    if judged is None:
        return None
    path = plan.directory / PRESET
    write_preset(path, _preset(plan, models, judged, parts))
    return Outcome(path, judged, parts, search.default)


def _identity(plan: TunePlan, models: dict[str, Model]) -> dict[str, Any]:
    """What must not change within one search."""
    model = next(iter(models.values()))
    return {
        "target": model.target.fingerprint,
        "drafters": {name: one.drafter_fingerprint for name, one in models.items()},
        "prompts": plan.prompts.sha256,
        "sampling": plan.sampling.model_dump(mode="json", exclude_defaults=True),
        "concurrency": plan.concurrency,
        "dtype": model.precision,
        "device": model.device_name,
        "processor": processor(),
    }


def _preset(
    plan: TunePlan, models: dict[str, Model], judged: list[Confirmed], parts: Split
) -> PresetFile:
    best, model = judged[0], next(iter(models.values()))
    plain = min(one.ms_per_token for one in judged if one.setup.mode == "plain")
    drafter = best.setup.drafter
    tuned = Tuned(
        date=date.today().isoformat(),
        machine={
            name: value for name, value in machine().items() if name in TOLD_OF_MACHINE and value
        },
        versions=versions(),
        target_fingerprint=model.target.fingerprint,
        drafter_fingerprint=None if drafter is None else models[drafter].drafter_fingerprint,
        prompts=plan.prompts.name,
        prompts_sha256=plan.prompts.sha256,
        num_prompts=len(plan.prompts.token_ids),
        max_tokens=plan.sampling.max_tokens,
        temperature=plan.sampling.temperature,
        concurrency=plan.concurrency,
        seed=plan.seed,
        trials=plan.trials,
        judged_on_other_prompts=parts.is_clean,
        ms_per_token=round(best.ms_per_token, 3),
        plain_ms_per_token=round(plain, 3),
        speed_up=round(best.speed_up.value, 3),
        speed_up_interval=(round(best.speed_up.low, 3), round(best.speed_up.high, 3)),
        answers=tuple(
            AnswerRounds(rounds=one.rounds, committed=one.committed)
            for one in best.cases
            if one.rounds
        ),
    )
    return PresetFile(
        target=model.target.source,
        drafter=None if drafter is None else _named(models, drafter),
        dtype=model.dtype_name,
        quantize=model.quantize,
        threads=best.setup.threads,
        mode=best.setup.mode,
        tuned=tuned,
        **best.setup.told,
    )


def _named(models: dict[str, Model], drafter: str) -> str | None:
    """What a preset calls the drafter: None where the target's name brings it."""
    model = models[drafter]
    if drafter != OWN:
        return drafter
    return (
        None
        if model.target.source in PRESETS and model.preset is not None
        else str(model.drafter_path)
    )
