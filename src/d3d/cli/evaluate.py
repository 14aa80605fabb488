"""`d3d evaluate`: acceptance of a drafter on recorded answers, without running the target."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Annotated

import typer


def evaluate(
    drafter: Annotated[str, typer.Argument(help="Drafter: directory, hub id or preset.")],
    corpus: Annotated[Path, typer.Argument(help="Recorded answers, made by `d3d data` of prompts that were not trained on.")],
    target: Annotated[str, typer.Option(help="Preset, directory, GGUF file or hub id of the target.")] = "smollm2-135m",
    draft_length: Annotated[int | None, typer.Option(help="Tokens to draft a round; the block size by default.", min=1)] = None,
    limit: Annotated[int | None, typer.Option(help="Most answers to replay.", min=1)] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    dtype: Annotated[str, typer.Option(help="auto, float32 or bfloat16.")] = "auto",
) -> None:
    """Replay rounds of greedy drafting against recorded answers; prints one JSON object."""
    from d3d.cli.console import meter
    from d3d.core.errors import InvalidRequest
    from d3d.models.checkpoint import load_drafter, read_config
    from d3d.models.fingerprint import tokenizer_fingerprint
    from d3d.models.loading import resolve_drafter
    from d3d.models.open_model import open_model
    from d3d.training.corpus import read_corpus
    from d3d.training.evaluate import replay

    directory = resolve_drafter(drafter)
    read_config(directory)
    base = open_model(target, device=device, dtype=dtype)
    model = load_drafter(directory, base)
    samples = read_corpus(corpus, tokenizer_fingerprint(base.tokenizer))[:limit]
    if not any(len(sample.answer_ids) > 1 for sample in samples):
        raise InvalidRequest(f"{corpus}: no answer of two tokens or more, so nothing can be measured")
    length = model.config.block_size if draft_length is None else draft_length
    if length > model.config.block_size:
        raise InvalidRequest(f"draft length: {length} is above the drafter's block size, {model.config.block_size}")
    with meter(len(samples)) as progress:
        done = itertools.count(1)
        acceptance = replay(model, samples, length, lambda: progress.show(next(done), "answers"))
    typer.echo(
        json.dumps(
            {
                "answers": len(samples),
                "draft_length": length,
                "rounds": acceptance.rounds,
                "acceptance_length": acceptance.acceptance_length,
                "acceptance_at": acceptance.acceptance_at,
                "num_accepted_histogram": acceptance.histogram,
            }
        )
    )
