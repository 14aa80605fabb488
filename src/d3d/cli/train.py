"""`d3d train`: train a drafter on a corpus that its target has written."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer


def train(
    corpus: Annotated[Path, typer.Argument(help="Corpus made by `d3d data`.")],
    output: Annotated[Path, typer.Argument(help="Directory of the run; a run that was interrupted goes on.")],
    held_out: Annotated[Path, typer.Option(help="Corpus that is measured and never trained on.")],
    config: Annotated[Path | None, typer.Option(help="YAML file; without one the defaults train low-rank deltas at slots.")] = None,
    target: Annotated[str, typer.Option(help="Preset, directory, GGUF file or hub id of the target.")] = "smollm2-135m",
    minutes: Annotated[float | None, typer.Option(help="Stop, resumably, after this long.", min=0.0)] = None,
    allow_evaluation_prompts: Annotated[
        bool, typer.Option("--allow-evaluation-prompts", help="Train even on a corpus that holds problems of evaluation sets.")
    ] = False,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    dtype: Annotated[str, typer.Option(help="auto, float32 or bfloat16.")] = "auto",
) -> None:
    """Train a drafter of the target's own layers; the best on the held-out answers is kept in OUTPUT/best."""
    from d3d.cli.console import meter, note
    from d3d.cli.interrupt import deferred_interrupt
    from d3d.models.fingerprint import tokenizer_fingerprint
    from d3d.models.open_model import open_model
    from d3d.training.corpus import read_corpus
    from d3d.training.corpus_writer import refuse_evaluation_corpus
    from d3d.training.run import RunConfig, TrainingRun, read_run_config
    from d3d.training.trainer import StepStats

    settings = read_run_config(config) if config else RunConfig()
    if not allow_evaluation_prompts:
        refuse_evaluation_corpus(corpus)
    base = open_model(target, device=device, dtype=dtype)
    identity = tokenizer_fingerprint(base.tokenizer)
    run = TrainingRun(output, base, settings, read_corpus(corpus, identity), read_corpus(held_out, identity))
    for reason, count in run.left_out.items():
        note(f"left out {count} samples: {reason}", "yellow")
    deadline = None if minutes is None else time.monotonic() + 60 * minutes
    with deferred_interrupt() as interrupted, meter(settings.train.steps) as progress:

        def show(stats: StepStats) -> None:
            text = f"loss {stats.loss:.3f}  {stats.slots / stats.seconds:.0f} slots/s  best acceptance length {run.best:.3f}"
            progress.show(stats.step, text)

        run.run(show, stop=lambda: interrupted() or (deadline is not None and time.monotonic() > deadline))
    note(f"step {run.trainer.step} of {settings.train.steps}, {run.trainer.slots_seen} slots, best acceptance length {run.best:.3f}")
    if interrupted():
        note("interrupted; the same command goes on from here")
        raise typer.Exit(130)
    typer.echo(output / "best" if run.best else f"{output}: nothing measured yet; the same command goes on")
