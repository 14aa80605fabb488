"""`d3d train`: train a drafter on a corpus that its target has written."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from d3d.cli.options import DeviceOption

if TYPE_CHECKING:
    from d3d.training.config import RunConfig
    from d3d.training.run import TrainingRun


def train(
    corpus: Annotated[Path, typer.Argument(help="Corpus made by `d3d data`.")],
    output: Annotated[Path, typer.Argument(help="Directory of the run; a run that was interrupted goes on.")],
    held_out: Annotated[Path, typer.Option(help="Corpus that is measured and never trained on.")],
    config: Annotated[Path | None, typer.Option(help="YAML file; without one the defaults train low-rank deltas at slots.")] = None,
    target: Annotated[
        str | None, typer.Option(help="Preset, directory, GGUF file or hub id of the target. Default: the file's, else smollm2-135m.")
    ] = None,
    minutes: Annotated[float | None, typer.Option(help="Stop, resumably, after this long.", min=0.0)] = None,
    allow_evaluation_prompts: Annotated[
        bool, typer.Option("--allow-evaluation-prompts", help="Train on a corpus that holds problems of evaluation sets.")
    ] = False,
    device: DeviceOption = "auto",
    dtype: Annotated[str | None, typer.Option(help="auto, float32 or bfloat16. Default: the file's train.precision.")] = None,
) -> None:
    """Train a drafter; the best on the held-out answers is kept in OUTPUT/best. Several processes: torchrun -m d3d.cli.app train."""
    from d3d.cli.console import note
    from d3d.training.config import RunConfig, read_run_config
    from d3d.training.corpus_writer import refuse_evaluation_corpus
    from d3d.training.parallel import processes

    settings = read_run_config(config) if config else RunConfig()
    if not allow_evaluation_prompts:
        refuse_evaluation_corpus(corpus)
    with processes(device) as own_device:
        run = _open(settings, (corpus, held_out, output), target, own_device, dtype)
        interrupted = _train(run, minutes)
    if run.parallel.rank == 0:
        trainer = run.trainer
        done = f"step {trainer.step} of {settings.train.steps}, {trainer.slots_seen} slots, best acceptance length {run.best:.3f}"
        note(done)
        if interrupted:
            note("interrupted; the same command goes on from here")
        else:
            typer.echo(output / "best" if run.best else f"{output}: nothing measured yet; the same command goes on")
    if interrupted:
        raise typer.Exit(130)


def _open(settings: RunConfig, paths: tuple[Path, Path, Path], target: str | None, device: str, dtype: str | None) -> TrainingRun:
    """paths: corpus, held-out corpus, directory of the run."""
    from d3d.models.fingerprint import tokenizer_fingerprint
    from d3d.models.loading import load_tokenizer, resolve_tokenizer
    from d3d.models.open_model import open_model
    from d3d.training.corpus import read_corpus
    from d3d.training.parallel import choose_parallel
    from d3d.training.run import Author, TrainingRun

    corpus, held_out, output = paths
    source = target or (settings.target.source if settings.target else "smollm2-135m")
    author = Author(source, load_tokenizer(resolve_tokenizer(source))) if settings.drafter.base else None
    base = open_model(
        settings.drafter.base.source if settings.drafter.base else source, device=device, dtype=dtype or settings.train.precision
    )
    identity = tokenizer_fingerprint(author.tokenizer if author else base.tokenizer)
    samples, measured = read_corpus(corpus, identity), read_corpus(held_out, identity)
    parallel = choose_parallel(settings.train.distributed, full_weights=settings.drafter.delta is None, device=base.transformer.device)
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
