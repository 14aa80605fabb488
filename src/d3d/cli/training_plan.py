"""`d3d train --dry-run`: what a run would take, as a table on standard output."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from d3d.train.config import ModelSpec, RunConfig
    from d3d.train.corpus import Sample
    from d3d.train.plan import Machine, Plan

GB = 1e9


def print_plan(
    settings: RunConfig,
    target: ModelSpec,
    beside: Path,
    corpus: Path | None,
    machine: Machine,
    *,
    calibrate: bool,
) -> None:
    """beside: the directory that paths in the configuration are relative to; calibrate: measure the
    rate where the model is here."""
    from d3d.hub.names import is_here
    from d3d.train.corpus import read_corpus
    from d3d.train.plan import find_config, plan_run

    base = settings.drafter.base or target
    samples: list[Sample] | None = None if corpus is None else read_corpus(corpus)
    plan = plan_run(settings, target.source, find_config(base, beside), samples, machine)
    if calibrate and is_here(base.source) and plan.memory.peak < plan.memory.available:
        plan = plan_run(
            settings,
            target.source,
            find_config(base, beside),
            samples,
            _measured(machine, settings, base.source),
        )
    width = max(len(name) for name, _ in rows(plan))
    for name, text in rows(plan):
        typer.echo(f"{name:<{width}}  {text}")


def _measured(machine: Machine, settings: RunConfig, base: str) -> Machine:
    import dataclasses

    from d3d.hub.open_model import open_model
    from d3d.train.plan import measure_flops

    opened = open_model(
        base, device=str(machine.device), dtype=str(machine.dtype).removeprefix("torch.")
    )
    return dataclasses.replace(
        machine, flops_per_second=measure_flops(opened, settings), measured=True
    )


def rows(plan: Plan) -> list[tuple[str, str]]:
    """Name and text of each line."""
    memory, kept = plan.memory, plan.kept_layers
    layers = "all" if len(kept) == plan.base_layers else ", ".join(map(str, kept))
    corpus = (
        "no corpus given: texts of max_length, a quarter of each prompt"
        if plan.answers is None
        else f"{plan.answers} answers"
    )
    epochs = "" if plan.epochs is None else f", {plan.epochs:.2f} epochs"
    stages = "; ".join(
        f"{slots:,.0f} in blocks of {stage.block_size} ({stage.share:.0%})"
        for stage, slots in plan.slots
    )
    how = "measured here" if plan.measured else "stated, not measured; --tflops gives another"
    fits = "fits" if memory.peak <= memory.available else "does NOT fit"
    return [
        ("target", plan.target),
        ("base", f"{plan.base}, {len(kept)} of {plan.base_layers} layers kept ({layers})"),
        ("parameters", f"{plan.trainable:,} trainable, {plan.frozen:,} frozen"),
        ("processes", f"{plan.processes} ({plan.distribution})"),
        ("corpus", corpus + epochs),
        ("tokens a step", f"{plan.clean_tokens:,.0f} clean; slots: {stages}"),
        (
            "tokens in all",
            f"{plan.total_clean:,.0f} clean, {plan.total_slots:,.0f} slots in {plan.steps:,} steps",
        ),
        (
            "time",
            f"{_time(plan.seconds_a_step)} a step, {_time(plan.seconds_a_step * plan.steps)} in all, without evaluation",
        ),
        (
            "rate",
            f"{plan.flops_per_second / 1e12:.3g} TFLOP/s a process ({how}), {plan.flops_a_step / 1e12:,.3g} TFLOP a step",
        ),
        ("weights", f"{_gb(memory.frozen_weights)} frozen, {_gb(memory.trained_weights)} trained"),
        ("gradients", _gb(memory.gradients)),
        ("optimizer", _gb(memory.optimizer)),
        ("activations", f"{_gb(memory.activations)} at most"),
        ("peak memory", f"{_gb(memory.peak)} a process, {_gb(memory.available)} free: {fits}"),
    ]


def _gb(num_bytes: float) -> str:
    return f"{num_bytes / GB:.2f} GB"


def _time(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:,.1f} h"
