"""`d3d data`: have the target answer prompts, as a corpus to train a drafter on."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from d3d.cli import options as o


def data(
    corpus: Annotated[Path, typer.Argument(help="Corpus to write, or to go on with (JSON lines).")],
    prompts: Annotated[
        list[Path], typer.Option(help="Prompts as JSON lines: messages, turns, prompt, question, problem, instruction or text.")
    ],
    target: Annotated[str, typer.Option(help="Preset, directory, GGUF file or hub id of the target.")] = "smollm2-135m",
    exclude: Annotated[list[Path] | None, typer.Option(help="Prompts that must not be used (JSON lines), whatever their suffix.")] = None,
    limit: Annotated[int | None, typer.Option(help="Most prompts to take of each file, drawn by seed.", min=1)] = None,
    suffix: Annotated[str, typer.Option(help="Text to put behind every prompt.")] = "",
    temperature: Annotated[float, typer.Option(help="0 writes greedy answers.", min=0.0)] = 0.0,
    max_tokens: Annotated[int, typer.Option(help="Longest answer in tokens.", min=1)] = 256,
    batch: Annotated[int, typer.Option(help="Answers written at a time.", min=1)] = 48,
    seed: Annotated[int, typer.Option(help="Draws the prompts and the noise of sampling.", min=0)] = 0,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    dtype: Annotated[str, typer.Option(help="auto, float32 or bfloat16.")] = "auto",
) -> None:
    """Write the target's answers to prompts into a training corpus. Prompts that the corpus holds already are skipped."""
    o.sampling_options({"temperature": temperature, "max_tokens": max_tokens})
    from d3d.cli.console import meter, note
    from d3d.models.open_model import open_model
    from d3d.training.corpus import append_samples, open_corpus
    from d3d.training.prompts import LeftOut, draw_prompts
    from d3d.training.regenerate import AnswerOptions, answer_prompts

    model = open_model(target, device=device, dtype=dtype)
    options = AnswerOptions(max_tokens=max_tokens, temperature=temperature, batch=batch, seed=seed)
    left_out = LeftOut()
    drawn = draw_prompts(prompts, model.tokenizer, exclude=exclude or [], limit=limit, suffix=suffix, seed=seed, left_out=left_out)
    known = open_corpus(corpus, model)
    chosen = [prompt for prompt in drawn if (tuple(prompt.token_ids), temperature) not in known]
    done = written = tokens = 0
    with meter(len(chosen)) as progress:
        for samples in answer_prompts(model, chosen, options):
            append_samples(corpus, samples)
            done = min(done + batch, len(chosen))
            written += len(samples)
            tokens += sum(len(sample.answer_ids) for sample in samples)
            progress.show(done, f"answers, {tokens} tokens")
    for line in left_out.lines():
        note(line, "yellow")
    if written < len(chosen):
        note(f"left out {len(chosen) - written} prompts that leave no room for an answer in the target's context", "yellow")
    typer.echo(f"{corpus}: {len(known) + written} answers, {written} of them new with {tokens} tokens")
