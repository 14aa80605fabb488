"""`d3d data`: write the target's answers to prompts into a corpus to train a drafter on."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from d3d.cli import options as o
from d3d.cli.requests import thinking_warning


@o.takes(o.TARGET)
def data(
    *,
    corpus: Annotated[
        Path,
        typer.Argument(help="Corpus to write or to continue: JSON lines, or a directory of them."),
    ],
    prompts: Annotated[
        list[str],
        typer.Option(
            help="Prompts: JSON lines (.gz too), .json, .parquet, a directory, or a data set "
            "ORG/NAME[:CONFIG][:SPLIT]; their rows hold messages, conversations, turns, prompt, "
            "question, problem, instruction or text, and input, context and system beside these. "
            "May be repeated."
        ),
    ],
    exclude: Annotated[
        list[str] | None, typer.Option(help="Prompts not to use, whatever their answer format.")
    ] = None,
    limit: Annotated[
        int | None, typer.Option(help="Most prompts to take of each source, drawn by seed.", min=1)
    ] = None,
    suffix: Annotated[
        str,
        typer.Option(
            help="Answer format: boxed, steps, code, or a text to append to the prompt (or to put "
            "around {prompt})."
        ),
    ] = "",
    suffix_share: Annotated[
        float,
        typer.Option(
            help="Share of the prompts that get the suffix, drawn by seed.", min=0.0, max=1.0
        ),
    ] = 1.0,
    temperature: Annotated[
        list[float] | None,
        typer.Option(
            help="0 writes greedy answers; repeat it for an answer at each. Default: 0.", min=0.0
        ),
    ] = None,
    thinking: o.ThinkingOption = None,
    max_tokens: Annotated[int, typer.Option(help="Longest answer in tokens.", min=1)] = 256,
    top_logits: Annotated[
        int,
        typer.Option(
            help="Number of the target's best logits to keep at each token, to distil from.", min=0
        ),
    ] = 0,
    shard_answers: Annotated[
        int | None,
        typer.Option(
            help="Make the corpus a directory with this many answers per file. Default: one file.",
            min=1,
        ),
    ] = None,
    allow_evaluation_prompts: Annotated[
        bool,
        typer.Option(
            "--allow-evaluation-prompts",
            help="Use problems of evaluation sets, for a corpus to evaluate on, not to train on.",
        ),
    ] = False,
    skip_evaluation_prompts: Annotated[
        bool,
        typer.Option(
            "--skip-evaluation-prompts",
            help="Leave problems of evaluation sets out instead of refusing them.",
        ),
    ] = False,
    batch: Annotated[int, typer.Option(help="Answers written at a time.", min=1)] = 48,
    seed: Annotated[
        int, typer.Option(help="Seed of the draw of prompts and of sampling.", min=0)
    ] = 0,
    device: o.DeviceOption = "auto",
    dtype: o.DTypeOption = "auto",
    model: str | None,
) -> None:
    """Write the target's answers to prompts into a training corpus.

    Answers that the corpus has already are not written again."""
    from d3d.cli.console import meter, note
    from d3d.cli.interrupt import telling_what_is_kept
    from d3d.errors import InvalidRequest
    from d3d.hub.open_model import open_model
    from d3d.model.linear import pack_weights
    from d3d.request_options import sampling_params
    from d3d.train.answers import AnswerOptions, CorpusPlan, CorpusRun
    from d3d.train.prompts import PromptOptions

    for each in temperature or ():
        sampling_params({"temperature": each, "max_tokens": max_tokens})
    if allow_evaluation_prompts and skip_evaluation_prompts:
        raise InvalidRequest(
            "--allow-evaluation-prompts and --skip-evaluation-prompts contradict each other; give "
            "one of them"
        )
    on_evaluation_prompt = (
        "allow" if allow_evaluation_prompts else "skip" if skip_evaluation_prompts else "refuse"
    )
    plan = CorpusPlan(
        corpus,
        tuple(prompts),
        tuple(exclude or ()),
        PromptOptions(limit, suffix, suffix_share, thinking, seed, on_evaluation_prompt),  # type: ignore[arg-type]
        AnswerOptions(max_tokens, tuple(temperature or (0.0,)), batch, seed, top_logits, thinking),
        shard_answers,
    )
    plan.check()
    base = open_model(model or o.DEFAULT_MODEL, device=device, dtype=dtype)
    pack_weights(base.transformer)
    if warning := thinking_warning(base, thinking):
        note(warning, "yellow")
    run = CorpusRun(base, plan)
    with (
        telling_what_is_kept(lambda: f"{corpus} holds {run.answers} answers"),
        meter(run.num_turns) as progress,
    ):
        run.write(lambda: progress.show(run.turns_done, f"answers, {run.new_tokens} tokens"))
    for line in run.left_out.lines():
        note(line, "yellow")
    if run.replaced:
        note(f"wrote {run.replaced} answers anew that were cut before")
    if run.cut:
        note(
            f"{run.cut} of {run.answers} answers are cut by --max-tokens or the context; a higher "
            "--max-tokens writes those that it cut anew",
            "yellow",
        )
    typer.echo(
        f"{corpus}: {run.answers} answers, {run.new_answers} of them new with {run.new_tokens} "
        "tokens"
    )
