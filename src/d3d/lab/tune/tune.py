"""`d3d tune` without its command line: from a target, drafters and prompts to a preset file."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from d3d.api import Model
from d3d.engine.params import SamplingParams
from d3d.errors import InvalidRequest
from d3d.files import alone_in
from d3d.hub.checkpoint import read_config
from d3d.hub.names import drafter_of, resolve_drafter
from d3d.hub.open_drafter import ready_drafters
from d3d.hub.open_model import open_model
from d3d.hub.presets import (
    PRESETS,
    TUNED,
    AnswerRounds,
    PresetFile,
    Tuned,
    is_preset_file,
    read_preset,
    write_preset,
)
from d3d.lab.tune.confirm import CONFIRMATIONS, Confirmation, Confirmed, finalists, with_plain
from d3d.lab.tune.measure import Case, EngineMeasurer, Measurer
from d3d.lab.tune.prompts import CaseSplit, TuningPrompts, grouped, split
from d3d.lab.tune.search import Search, SearchPlan, Stop
from d3d.lab.tune.setups import MODES, OWN, DrafterFacts, Setup, Space
from d3d.loader import load
from d3d.machine import machine, processor, versions
from d3d.methods.async_.placement import available_cores, default_placement
from d3d.methods.base import Parts
from d3d.methods.fused.engine import check_fused
from d3d.target.native import NativeTarget

JOURNAL, CONFIRMED, PRESET = "search.log", "confirmed.jsonl", "preset.yaml"
MACHINE_FACTS = ("processor", "cores", "gpus", "platform")
"""Those that the preset records."""


@dataclass(frozen=True)
class TunePlan:
    """The purpose of a tuning run, and its length."""

    directory: Path
    prompts: TuningPrompts
    sampling: SamplingParams
    concurrency: int = 1
    trials: int = 40
    finalists: int = 3
    seed: int = 0

    @property
    def cases(self) -> list[Case]:
        return [list(case) for case in grouped(self.prompts.token_ids, self.concurrency)]


class StageProgress(Protocol):
    """Shows the progress of a stage."""

    def show(self, completed: int, text: str) -> None: ...


Metering = Callable[[int], AbstractContextManager[StageProgress]]
"""Progress towards a total."""


class TuneResult(NamedTuple):
    """The preset, and the measurements behind it."""

    preset: Path
    judged: list[Confirmed]
    """The fastest first."""
    split: CaseSplit
    default: Setup


def open_models(
    target: str, drafters: Sequence[str], *, device: str, dtype: str, quantize: str | None = None
) -> dict[str, Model]:
    """Models of one target with a drafter each, by the drafter's name; without drafters the
    target's own, which is OWN.

    A preset file's choices of decoding are ignored, since they are searched; its quantization is
    kept, since it makes another target. Raises InvalidRequest if there is no drafter at all,
    InvalidCheckpoint for what is none."""
    if not drafters:
        before = torch.get_num_threads()
        model = load(target, device=device, dtype=dtype, quantize=quantize)
        torch.set_num_threads(before)
        if model.parts.drafter is None:
            raise InvalidRequest(
                f"there is no drafter to tune for {target}: name one or more with --drafter, or a "
                "preset with --model"
            )
        return {OWN: Model(model.parts)}
    paths = {name: resolve_drafter(name) for name in drafters}
    for path in paths.values():
        read_config(path)
    if is_preset_file(target):
        preset = read_preset(target)
        target, quantize = preset.target, preset.quantize if quantize is None else quantize
    base = open_model(target, device=device, dtype=dtype, quantize=quantize)
    native = NativeTarget(base.transformer)
    ready = ready_drafters(base, list(paths.values()))
    return {
        name: Model(Parts(base, native, drafter, path))
        for (name, path), drafter in zip(paths.items(), ready, strict=True)
    }


def _first(models: Mapping[str, Model]) -> Model:
    """They share the target."""
    return next(iter(models.values()))


def space_of(models: dict[str, Model], modes: Sequence[str], threads: Sequence[int]) -> Space:
    """The space of these drafters on this machine. modes: empty for all. Raises InvalidRequest if
    it is empty."""
    device = _first(models).target.device
    cores = len(available_cores())
    wanted = tuple(modes) or tuple(mode for mode in MODES if mode != "async" or cores > 1)
    space = Space(
        wanted,
        tuple(_facts(name, model) for name, model in models.items()),
        _thread_choices(threads, cores) if device.type == "cpu" else (),
        placements(device, cores),
    )
    if not space.ways:
        raise InvalidRequest(
            f"mode: these drafters can't do {', '.join(wanted)}; leave --mode out, or name serial"
        )
    return space


def placements(device: torch.device, cores: int) -> tuple[str, ...]:
    """Placements of async mode's draft worker for a target on this device, the default first."""
    if device.type == "cpu":
        return ("thread", "processes") if cores > 1 else ("thread",)
    return tuple(dict.fromkeys((default_placement(device), "streams", "thread")))


def _facts(name: str, model: Model) -> DrafterFacts:
    drafter, longest = model.parts.drafter, 0
    assert drafter is not None
    assert isinstance(model.parts.target, NativeTarget)
    try:
        check_fused(drafter, model.parts.target.model)
        longest = drafter.config.longest_slot_draft
    except InvalidRequest:
        pass  # it has no fused mode
    return DrafterFacts(name, drafter.config.block_size, longest)


def _thread_choices(given: Sequence[int], cores: int) -> tuple[int, ...]:
    """By default powers of two up to the cores; always torch's own number."""
    doubled = [2**power for power in range(cores.bit_length()) if 2**power <= cores]
    return tuple(sorted({*(given or doubled), torch.get_num_threads()}))


def tune(
    plan: TunePlan, models: dict[str, Model], space: Space, meter: Metering, stop: Stop
) -> TuneResult | None:
    """Search, confirm, and write the preset; None if `stop` ended it early. Measurements are kept,
    and not repeated. meter: shows the progress of each stage.

    Raises InvalidRequest if the directory holds another search, or another process works in it."""
    measurer = EngineMeasurer(models, plan.cases, plan.sampling)
    try:
        with alone_in(plan.directory, "d3d tune"):
            return _run(plan, models, space, measurer, meter, stop)
    finally:
        measurer.close()


def _run(
    plan: TunePlan,
    models: dict[str, Model],
    space: Space,
    measure: Measurer,
    meter: Metering,
    stop: Stop,
) -> TuneResult | None:
    TUNED.check(plan.directory / PRESET)
    CONFIRMATIONS.check(plan.directory / CONFIRMED)
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
    return TuneResult(path, judged, parts, search.default)


def _identity(plan: TunePlan, models: dict[str, Model]) -> dict[str, Any]:
    """Facts that must not change within a search."""
    model = _first(models)
    return {
        "target": model.target.fingerprint,
        "drafters": {name: each.drafter_fingerprint for name, each in models.items()},
        "prompts": plan.prompts.sha256,
        "sampling": plan.sampling.model_dump(mode="json", exclude_defaults=True),
        "concurrency": plan.concurrency,
        "dtype": model.precision,
        "device": model.device_name,
        "processor": processor(),
    }


def _preset(
    plan: TunePlan, models: dict[str, Model], judged: list[Confirmed], parts: CaseSplit
) -> PresetFile:
    best, model = judged[0], _first(models)
    drafter = best.setup.drafter
    return PresetFile(
        target=model.target.source,
        drafter=None if drafter is None else _drafter_name(models, drafter),
        dtype=model.dtype_name,
        quantize=model.quantize,
        threads=best.setup.threads,
        mode=best.setup.mode,
        tuned=_tuned(plan, models, judged, parts),
        **best.setup.given,
    )


def _tuned(
    plan: TunePlan, models: dict[str, Model], judged: list[Confirmed], parts: CaseSplit
) -> Tuned:
    """Provenance of the preset."""
    best, drafter = judged[0], judged[0].setup.drafter
    plain_ms = min(each.ms_per_token for each in judged if each.setup.mode == "plain")
    facts = machine()
    return Tuned(
        date=date.today().isoformat(),
        machine={name: facts[name] for name in MACHINE_FACTS if facts.get(name)},
        versions=versions(),
        target_fingerprint=_first(models).target.fingerprint,
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
        plain_ms_per_token=round(plain_ms, 3),
        speed_up=round(best.speed_up.value, 3),
        speed_up_interval=(round(best.speed_up.low, 3), round(best.speed_up.high, 3)),
        answers=tuple(
            AnswerRounds(rounds=case.rounds, committed=case.committed)
            for case in best.cases
            if case.rounds
        ),
    )


def _drafter_name(models: dict[str, Model], drafter: str) -> str | None:
    """The drafter's name in a preset; None if the target's name implies it."""
    if drafter != OWN:
        return drafter
    source, path = models[OWN].target.source, models[OWN].parts.drafter_path
    return None if source in PRESETS and drafter_of(source) == path else str(path)
