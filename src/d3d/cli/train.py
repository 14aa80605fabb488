"""`d3d train`: train a drafter on a corpus written by its target."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from d3d.cli import options as o

if TYPE_CHECKING:
    from d3d.train.config import ModelSpec, RunConfig
    from d3d.train.plan import TrainingPlan
    from d3d.train.run import TrainingRun


@o.takes(o.TARGET)
def train(
    *,
    corpus: Annotated[Path | None, typer.Argument(help="Corpus made by `d3d data`.")] = None,
    output: Annotated[
        Path | None, typer.Argument(help="Directory of the run; an interrupted run continues.")
    ] = None,
    held_out: Annotated[
        Path | None, typer.Option(help="Corpus to measure on, never trained on.")
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(help="YAML file; without one the defaults train low-rank deltas at slots."),
    ] = None,
    minutes: Annotated[
        float | None, typer.Option(help="Stop, resumably, after this long.", min=0.0)
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="Only print what the run would take; needs no corpus and no weights."
        ),
    ] = False,
    planned_processes: Annotated[
        int | None,
        typer.Option("--processes", help="With --dry-run: processes to plan for.", min=1),
    ] = None,
    tflops: Annotated[
        float | None,
        typer.Option(help="With --dry-run: rate of one process, in 10^12 operations/s.", min=1e-6),
    ] = None,
    allow_evaluation_prompts: Annotated[
        bool,
        typer.Option(
            "--allow-evaluation-prompts", help="Train on a corpus with problems of evaluation sets."
        ),
    ] = False,
    device: o.DeviceOption = "auto",
    dtype: Annotated[
        str | None,
        typer.Option(help="auto, float32 or bfloat16. Default: the file's train.precision."),
    ] = None,
    model: str | None,
) -> None:
    """Train a drafter; the best on the held-out answers is kept in OUTPUT/best.

    For several processes, run torchrun -m d3d.cli.app train."""
    from d3d.errors import InvalidRequest
    from d3d.train.config import RunConfig, read_run_config
    from d3d.train.corpus import lines_of
    from d3d.train.corpus_writer import refuse_evaluation_corpus
    from d3d.train.parallel import processes
    from d3d.train.trainer import TrainingNotFinite

    settings = read_run_config(config) if config else RunConfig()
    if not allow_evaluation_prompts and corpus is not None:
        refuse_evaluation_corpus(corpus)
    if dry_run:
        if minutes is not None:
            raise InvalidRequest("--minutes means nothing with --dry-run, which trains nothing")
        machine = (planned_processes or 1, tflops, device, dtype)
        _print_plan(settings, config, model, corpus, machine)
        return
    if planned_processes is not None or tflops is not None:
        raise InvalidRequest(
            "--processes and --tflops are for --dry-run; torchrun starts several processes"
        )
    if corpus is None or output is None or held_out is None:
        raise InvalidRequest(
            "give a corpus, a directory for the run, and --held-out with a corpus to measure on"
        )
    with processes(device) as own_device:
        run = _open(settings, (corpus, held_out, output), model, own_device, dtype)
        try:
            interrupted = _train(run, minutes)
        except TrainingNotFinite as error:
            error.where += f" ({'; '.join(lines_of(corpus, error.samples))})"
            raise
    if run.parallel.rank == 0:
        _report(run, output, interrupted=interrupted)
    if interrupted:
        raise typer.Exit(130)


def _target(settings: RunConfig, target: str | None) -> ModelSpec:
    """Model that writes the corpus: the option's, else the file's, else the default."""
    from d3d.train.config import ModelSpec

    if target is None and settings.target is not None:
        return settings.target
    return ModelSpec(source=target or o.DEFAULT_MODEL)


def _precision(settings: RunConfig, dtype: str | None) -> str:
    return settings.train.precision if dtype is None else dtype


def _open(
    settings: RunConfig,
    paths: tuple[Path, Path, Path],
    target: str | None,
    device: str,
    dtype: str | None,
) -> TrainingRun:
    """paths: corpus, held-out corpus, directory of the run."""
    from d3d.hub.fingerprint import tokenizer_fingerprint
    from d3d.hub.names import resolve_tokenizer
    from d3d.hub.open_model import load_tokenizer, open_model
    from d3d.train.corpus import read_corpus
    from d3d.train.parallel import choose_parallel
    from d3d.train.run import Author, TrainingRun

    corpus, held_out, output = paths
    source, author = _target(settings, target).source, None
    base_source = source
    if settings.drafter.base is not None:
        base_source = settings.drafter.base.source
        author = Author(source, load_tokenizer(resolve_tokenizer(source)))
    base = open_model(base_source, device=device, dtype=_precision(settings, dtype))
    identity = tokenizer_fingerprint(author.tokenizer if author else base.tokenizer)
    vocab_size = base.vocab_size if author is None else None  # else checked against both models
    samples, measured = (read_corpus(file, identity, vocab_size) for file in (corpus, held_out))
    parallel = choose_parallel(
        settings.train.distributed,
        full_weights=settings.drafter.delta is None,
        device=base.transformer.device,
    )
    return TrainingRun(output, base, settings, samples, measured, author=author, parallel=parallel)


def _train(run: TrainingRun, minutes: float | None) -> bool:
    """Train; returns whether the run was interrupted."""
    from d3d.cli.console import note
    from d3d.cli.interrupt import deferred_interrupt
    from d3d.cli.training_view import training_view

    deadline = None if minutes is None else time.monotonic() + 60 * minutes
    with deferred_interrupt() as interrupted:

        def stop() -> bool:
            return interrupted() or (deadline is not None and time.monotonic() > deadline)

        if run.parallel.rank > 0:
            run.run(lambda _: None, stop=stop)
        else:
            for reason, count in run.left_out.items():
                note(f"left out {count} samples: {reason}", "yellow")
            with training_view(run) as view:
                run.run(view.show, stop=stop)
        return run.parallel.any(interrupted())


def _report(run: TrainingRun, output: Path, *, interrupted: bool) -> None:
    from d3d.cli.console import note

    trainer = run.trainer
    note(
        f"step {trainer.step} of {run.config.train.steps}, {trainer.slots_seen} slots, "
        f"best acceptance length {run.best:.3f}"
    )
    if interrupted:
        note("interrupted; run the same command to continue")
    elif run.best:
        typer.echo(output / "best")
    else:
        typer.echo(f"{output}: nothing measured yet; run the same command to continue")


def _print_plan(
    settings: RunConfig,
    file: Path | None,
    target: str | None,
    corpus: Path | None,
    machine: tuple[int, float | None, str, str | None],
) -> None:
    """Print a table of the run's cost.

    file: the configuration file, if any; machine: processes, their rate in TFLOP/s, device and
    dtype, as the options give them."""
    from d3d.hub.names import is_here
    from d3d.hub.open_model import open_model, pick_device, pick_dtype
    from d3d.train.corpus import read_corpus
    from d3d.train.plan import Machine, TrainingPlan, find_config, measure_flops

    num_processes, tflops, device, dtype = machine
    spec = _target(settings, target)
    base = settings.drafter.base or spec
    where = pick_device(device)
    precision = pick_dtype(_precision(settings, dtype), where)
    plan = TrainingPlan(
        settings,
        spec.source,
        find_config(base, file.parent if file else Path()),
        None if corpus is None else read_corpus(corpus),
        Machine(where, precision, num_processes, None if tflops is None else 1e12 * tflops),
    )
    if tflops is None and is_here(base.source) and plan.memory.peak < plan.machine.available():
        dtype_name = str(precision).removeprefix("torch.")
        model = open_model(base.source, device=str(where), dtype=dtype_name)
        rate = measure_flops(model, settings)
        plan.machine = Machine(where, precision, num_processes, rate, measured=True)
    table = _plan_rows(plan)
    width = max(len(name) for name, _ in table)
    for name, text in table:
        typer.echo(f"{name:<{width}}  {text}")


def _plan_rows(plan: TrainingPlan) -> list[tuple[str, str]]:
    """Name and text of each line."""
    memory, kept, machine = plan.memory, plan.kept_layers, plan.machine
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
    total_clean, seconds = plan.steps * plan.clean_tokens, plan.seconds_a_step
    how = "measured here" if machine.measured else "stated, not measured; --tflops gives another"
    available = machine.available()
    fits = "fits" if memory.peak <= available else "does NOT fit"
    return [
        ("target", plan.target),
        ("base", f"{plan.base}, {len(kept)} of {plan.base_layers} layers kept ({layers})"),
        ("parameters", f"{plan.trainable:,} trainable, {plan.frozen:,} frozen"),
        ("processes", f"{machine.processes} ({plan.distribution})"),
        ("corpus", corpus + epochs),
        ("tokens a step", f"{plan.clean_tokens:,.0f} clean; slots: {stages}"),
        (
            "tokens in all",
            f"{total_clean:,.0f} clean, {plan.total_slots:,.0f} slots in {plan.steps:,} steps",
        ),
        (
            "time",
            f"{_time(seconds)} a step, {_time(seconds * plan.steps)} in all, without evaluation",
        ),
        (
            "rate",
            f"{machine.rate / 1e12:.3g} TFLOP/s a process ({how}), "
            f"{plan.flops_a_step / 1e12:,.3g} TFLOP a step",
        ),
        ("weights", f"{_gb(memory.frozen_weights)} frozen, {_gb(memory.trained_weights)} trained"),
        ("gradients", _gb(memory.gradients)),
        ("optimizer", _gb(memory.optimizer)),
        ("activations", f"{_gb(memory.activations)} at most"),
        ("peak memory", f"{_gb(memory.peak)} a process, {_gb(available)} free: {fits}"),
    ]


def _gb(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.2f} GB"


def _time(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:,.1f} h"
