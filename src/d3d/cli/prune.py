"""`d3d prune`: remove layers from a drafter, the least harmful first, and choose a depth."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from d3d.cli.options import DeviceOption, DTypeOption
from d3d.files import FileKind, alone_in, write_whole
from d3d.json_text import to_json

if TYPE_CHECKING:
    from d3d.hub.open_model import OpenModel
    from d3d.lab.prune.curve import DepthTiming
    from d3d.lab.prune.run import PruneAnswers, PruningRun
    from d3d.train.config import TrainConfig
    from d3d.train.corpus import Sample

CURVES = {
    "json": FileKind("the curve of a pruning run", ("curve", "timings")),
    "md": FileKind("the table of a pruning run", marker="| layers | removed | acceptance length |"),
    "svg": FileKind("the picture of a pruning run", marker="written by d3d"),
}
"""Files of the result, by suffix."""
HEAL_STEPS = 50
ANSWERS_TOKENS = 96
"""Longest answer that --measure decodes."""


def prune(
    drafter: Annotated[
        str, typer.Argument(help="Drafter: directory, hub id or preset. It is only read.")
    ],
    held_out: Annotated[
        Path,
        typer.Argument(
            help="Answers that `d3d data` recorded: of every second prompt to choose by, of the "
            "rest to judge."
        ),
    ],
    output: Annotated[
        Path,
        typer.Argument(
            metavar="OUT", help="Directory of the run; an interrupted one is continued."
        ),
    ],
    target: Annotated[
        str,
        typer.Option(
            "--model",
            "-m",
            "--target",
            help="Preset, directory, GGUF file or hub id of the target.",
        ),
    ] = "smollm2-135m",
    judge: Annotated[
        Path | None,
        typer.Option(help="Recorded answers to judge by; then all of the others choose."),
    ] = None,
    fewest_layers: Annotated[int, typer.Option(help="Layers to stop at.", min=1)] = 1,
    shortlist: Annotated[
        int,
        typer.Option(
            help="Layers of least loss that are scored by acceptance length in each step.", min=1
        ),
    ] = 3,
    draft_length: Annotated[int, typer.Option(help="Tokens to draft a round.", min=1)] = 5,
    objective: Annotated[
        str,
        typer.Option(
            help="share: fewest layers that keep --share; serial, async: least time per token."
        ),
    ] = "share",
    share: Annotated[
        float, typer.Option(help="Share of the acceptance length at full depth.", min=0.0, max=1.0)
    ] = 0.99,
    heal: Annotated[
        Path | None, typer.Option(help="Corpus to train on after every removal.")
    ] = None,
    heal_steps: Annotated[
        int, typer.Option(help="Training steps after a removal; with --heal.", min=1)
    ] = HEAL_STEPS,
    config: Annotated[
        Path | None,
        typer.Option(help="Training configuration whose `train` section heals; with --heal."),
    ] = None,
    measure: Annotated[
        int,
        typer.Option(
            help="Answers to decode at every depth, plain and serial, for measured times.", min=0
        ),
    ] = 0,
    pictures: Annotated[
        bool, typer.Option("--pictures/--no-pictures", help="Draw OUT/curve.svg.")
    ] = True,
    seed: Annotated[int, typer.Option(help="Seed of the positions of blocks.", min=0)] = 0,
    device: DeviceOption = "auto",
    dtype: DTypeOption = "auto",
) -> None:
    """Prune a drafter's layers by their effect on acceptance length; prints the chosen
    checkpoint."""
    from d3d.errors import InvalidRequest
    from d3d.hub.checkpoint import read_config
    from d3d.hub.names import resolve_drafter
    from d3d.hub.open_model import open_model
    from d3d.lab.prune.curve import Objective
    from d3d.lab.prune.run import PruneSettings, PruningRun

    for suffix, kind in CURVES.items():
        kind.check(output / f"curve.{suffix}")
    objectives = get_args(Objective)
    if objective not in objectives:
        raise InvalidRequest(f"objective: {objective!r} is not one of {', '.join(objectives)}")
    if heal is None and (config is not None or heal_steps != HEAL_STEPS):
        raise InvalidRequest(
            "--config and --heal-steps say how a pruned drafter is healed; give --heal with a "
            "corpus, too"
        )
    source = resolve_drafter(drafter)
    read_config(source)
    healing = _healing(config, heal_steps) if heal else None
    base = open_model(target, device=device, dtype=dtype)
    answers = _answers(base, held_out, judge, heal)
    settings = PruneSettings(
        fewest_layers=fewest_layers, shortlist=shortlist, draft_length=draft_length, seed=seed
    )
    run = PruningRun(output, source, base, answers, settings, healing)
    _prune(run)
    timings = _time(run, answers.judging[:measure])
    _report(run, timings, objective, share, pictures=pictures)


def _healing(config: Path | None, steps: int) -> TrainConfig:
    from d3d.train.config import RunConfig, Stage, TrainConfig, read_run_config

    stage = Stage(share=1.0, block_size=6, anchors=100)
    short = TrainConfig(steps=steps, warmup=max(1, steps // 10), stages=(stage,))
    settings = read_run_config(config) if config else RunConfig(train=short)
    return settings.train.model_copy(update={"steps": steps})


def _answers(
    base: OpenModel, held_out: Path, judge: Path | None, heal: Path | None
) -> PruneAnswers:
    from d3d.hub.fingerprint import tokenizer_fingerprint
    from d3d.lab.prune.run import PruneAnswers
    from d3d.train.corpus import read_corpus

    def among(samples: list[Sample], prompts: set[tuple[int, ...]], wanted: bool) -> list[Sample]:
        return [each for each in samples if (tuple(each.prompt_ids) in prompts) is wanted]

    identity = tokenizer_fingerprint(base.tokenizer)
    choosing = read_corpus(held_out, identity, base.vocab_size)
    if judge is None:
        prompts = list(dict.fromkeys(tuple(sample.prompt_ids) for sample in choosing))
        odd = set(prompts[1::2])
        choosing, judging = among(choosing, odd, False), among(choosing, odd, True)
    else:
        judging = read_corpus(judge, identity, base.vocab_size)
    measured = {tuple(sample.prompt_ids) for sample in (*choosing, *judging)}
    healing = read_corpus(heal, identity, base.vocab_size) if heal else []
    return PruneAnswers(choosing, judging, tuple(among(healing, measured, False)))


def _prune(run: PruningRun) -> None:
    from d3d.cli.console import meter, note
    from d3d.cli.interrupt import telling_what_is_kept

    def kept() -> str:
        return f"{run.directory} holds {len(run.curve)} of {run.depths} depths"

    with telling_what_is_kept(kept), meter(run.depths) as progress:
        progress.show(len(run.curve), "depths")
        run.run(
            lambda depth: note(
                f"{depth.layers} layers: acceptance length {depth.judged:.3f}, without layer "
                f"{depth.removed}"
            ),
            lambda look: progress.show(len(run.curve), f"depths; {look}"),
        )


def _time(run: PruningRun, answers: list[Sample]) -> dict[int, DepthTiming]:
    from d3d.cli.console import meter
    from d3d.lab.prune.timing import time_drafter

    timings, length = {}, run.settings.draft_length
    with meter(len(run.curve)) as progress:
        for number, depth in enumerate(run.curve):
            progress.show(number, f"depths timed; {depth.layers} layers")
            path = run.checkpoint(depth)
            timings[depth.layers] = time_drafter(path, run.target, length, answers, ANSWERS_TOKENS)
    return timings


def _report(
    run: PruningRun,
    timings: dict[int, DepthTiming],
    objective: Any,
    share: float,
    *,
    pictures: bool,
) -> None:
    """Write curve.json, curve.md and curve.svg."""
    from d3d.cli.console import note
    from d3d.lab.prune.curve import choose
    from d3d.lab.report.pruning import curve_picture, curve_table

    depth, reason = chosen = choose(run.curve, timings, objective, share)
    record = {
        "curve": [each.model_dump(mode="json") for each in run.curve],
        "timings": {str(layers): timing.model_dump() for layers, timing in timings.items()},
        "draft_length": run.settings.draft_length,
        "chosen": {"layers": depth.layers, "reason": reason, "objective": objective},
    }
    files = {
        "json": to_json(record, indent=1) + "\n",
        "md": curve_table(run.curve, timings, chosen),
    }
    if pictures:
        files["svg"] = curve_picture(run.curve, timings, chosen)
    with alone_in(run.directory, "d3d prune"):
        for suffix, text in files.items():
            write_whole(run.directory / f"curve.{suffix}", CURVES[suffix], text)
    note(f"{depth.layers} layers: {reason}")
    typer.echo(run.checkpoint(depth))
