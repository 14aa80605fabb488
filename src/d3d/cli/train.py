"""`d3d train`: train a drafter on a corpus that its target has written."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from d3d.cli.options import DEFAULT_MODEL, DeviceOption

if TYPE_CHECKING:
    from d3d.train.config import RunConfig
    from d3d.train.run import TrainingRun


def train(
    corpus: Annotated[Path | None, typer.Argument(help="Corpus made by `d3d data`.")] = None,
    output: Annotated[
        Path | None,
        typer.Argument(help="Directory of the run; a run that was interrupted goes on."),
    ] = None,
    held_out: Annotated[
        Path | None, typer.Option(help="Corpus that is measured and never trained on.")
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(help="YAML file; without one the defaults train low-rank deltas at slots."),
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(
            help="Preset, directory, GGUF file or hub id of the target. Default: the file's, else smollm2-135m."
        ),
    ] = None,
    minutes: Annotated[
        float | None, typer.Option(help="Stop, resumably, after this long.", min=0.0)
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="Only print what it would take; needs no corpus and no weights."
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
            "--allow-evaluation-prompts",
            help="Train on a corpus that holds problems of evaluation sets.",
        ),
    ] = False,
    device: DeviceOption = "auto",
    dtype: Annotated[
        str | None,
        typer.Option(help="auto, float32 or bfloat16. Default: the file's train.precision."),
    ] = None,
) -> None:
    """Train a drafter; the best on the held-out answers is kept in OUTPUT/best. Several processes:
    torchrun -m d3d.cli.app train."""
    from d3d.errors import InvalidRequest
    from d3d.train.config import RunConfig, read_run_config
    from d3d.train.corpus_writer import refuse_evaluation_corpus
    from d3d.train.parallel import processes

    settings = read_run_config(config) if config else RunConfig()
    if not allow_evaluation_prompts and corpus is not None:
        refuse_evaluation_corpus(corpus)
    if dry_run:
        if minutes is not None:
            raise InvalidRequest("--minutes means nothing with --dry-run, which trains nothing")
        _plan(settings, config, target, corpus, (planned_processes or 1, tflops, device, dtype))
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
        run = _open(settings, (corpus, held_out, output), target, own_device, dtype)
        interrupted = _train(run, minutes)
    if run.parallel.rank == 0:
        _report(run, output, interrupted=interrupted)
    if interrupted:
        raise typer.Exit(130)


def _report(run: TrainingRun, output: Path, *, interrupted: bool) -> None:
    from d3d.cli.console import note

    trainer = run.trainer
    note(
        f"step {trainer.step} of {run.config.train.steps}, {trainer.slots_seen} slots, best acceptance length {run.best:.3f}"
    )
    if interrupted:
        note("interrupted; the same command goes on from here")
    else:
        typer.echo(
            output / "best"
            if run.best
            else f"{output}: nothing measured yet; the same command goes on"
        )


def _plan(
    settings: RunConfig,
    file: Path | None,
    target: str | None,
    corpus: Path | None,
    machine: tuple[int, float | None, str, str | None],
) -> None:
    """machine: processes, their rate, device and dtype as the options have them."""
    from d3d.cli.training_plan import print_plan
    from d3d.hub.open_model import pick_device, pick_dtype
    from d3d.train.config import ModelSpec
    from d3d.train.plan import Machine

    processes, tflops, device, dtype = machine
    where = pick_device(device)
    here = Machine(
        where,
        pick_dtype(dtype or settings.train.precision, where),
        processes,
        None if tflops is None else 1e12 * tflops,
    )
    spec = (
        ModelSpec(source=target) if target else settings.target or ModelSpec(source=DEFAULT_MODEL)
    )
    print_plan(
        settings, spec, file.parent if file else Path(), corpus, here, calibrate=tflops is None
    )


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
    source = target or (settings.target.source if settings.target else DEFAULT_MODEL)
    author = (
        Author(source, load_tokenizer(resolve_tokenizer(source))) if settings.drafter.base else None
    )
    base = open_model(
        settings.drafter.base.source if settings.drafter.base else source,
        device=device,
        dtype=dtype or settings.train.precision,
    )
    identity = tokenizer_fingerprint(author.tokenizer if author else base.tokenizer)
    samples, measured = read_corpus(corpus, identity), read_corpus(held_out, identity)
    parallel = choose_parallel(
        settings.train.distributed,
        full_weights=settings.drafter.delta is None,
        device=base.transformer.device,
    )
    return TrainingRun(output, base, settings, samples, measured, author=author, parallel=parallel)


def _train(run: TrainingRun, minutes: float | None) -> bool:
    """Whether it was interrupted."""
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
