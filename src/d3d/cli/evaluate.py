"""`d3d evaluate`: acceptance of a drafter on recorded answers, without running the target."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from d3d.cli.options import DEFAULT_MODEL, DeviceOption, DTypeOption, QuantizeOption

if TYPE_CHECKING:
    from d3d.drafting.packed_pass import GuessFrom
    from d3d.model.drafter import DrafterModel
    from d3d.model.transformer import Transformer

MODES = ("serial", "fused", "async")


def evaluate(
    drafter: Annotated[
        str, typer.Argument(help="Drafter: directory, hub id, preset or preset file.")
    ],
    corpus: Annotated[
        Path,
        typer.Argument(
            help="Recorded answers, made by `d3d data` of prompts that were not trained on."
        ),
    ],
    target: Annotated[
        str | None,
        typer.Option(
            help=f"Preset, directory, GGUF file or hub id of the target. Default: the preset file's, else {DEFAULT_MODEL}."
        ),
    ] = None,
    mode: Annotated[
        str,
        typer.Option(
            help="serial, fused or async: how rounds are replayed; async tells the hit rate."
        ),
    ] = "serial",
    draft_length: Annotated[
        int | None,
        typer.Option(
            help="Tokens to draft a round; by default the block size, in fused mode one fewer, in async mode 5.",
            min=1,
        ),
    ] = None,
    guess_from: Annotated[
        str | None,
        typer.Option(
            help="Async mode, where bonus tokens are guessed from: block (default) or clean_rows."
        ),
    ] = None,
    limit: Annotated[int | None, typer.Option(help="Most answers to replay.", min=1)] = None,
    device: DeviceOption = "auto",
    dtype: DTypeOption = "auto",
    quantize: QuantizeOption = None,
) -> None:
    """Replay rounds against recorded answers, greedy or sampled; prints one JSON object."""
    from d3d.cli.console import meter, note
    from d3d.cli.evaluation_record import acceptance_record, add_hits, hit_table
    from d3d.cli.tables import print_table
    from d3d.decoding.preset_choices import choices_of
    from d3d.drafting.packed_pass import PackedDrafter
    from d3d.errors import InvalidRequest
    from d3d.hub.checkpoint import read_config
    from d3d.hub.fingerprint import tokenizer_fingerprint
    from d3d.hub.names import resolve_drafter
    from d3d.hub.open_drafter import ready_drafters
    from d3d.hub.open_model import open_model
    from d3d.hub.presets import is_preset_file
    from d3d.train.corpus import corpus_files, corpus_identity, read_corpus
    from d3d.train.evaluate import by_source, replay, replay_fused
    from d3d.train.outcome_replay import replay_outcomes

    directory = resolve_drafter(drafter)
    read_config(directory)
    guess = _guess_from(mode, guess_from)
    target = target or (drafter if is_preset_file(drafter) else DEFAULT_MODEL)
    choices = choices_of(target)
    base = open_model(
        target,
        device=device,
        dtype=dtype,
        quantize=quantize or (choices.quantize if choices is not None else None),
    )
    (model,) = ready_drafters(base, [directory])
    samples = read_corpus(corpus, tokenizer_fingerprint(base.tokenizer))[:limit]
    if not any(len(sample.answer_ids) > 1 for sample in samples):
        raise InvalidRequest(
            f"{corpus}: no answer of two tokens or more, so nothing can be measured"
        )
    length = _draft_length(mode, model, base.transformer, draft_length)
    if corpus_identity(corpus_files(corpus)[0]).get("target_fingerprint") not in (
        None,
        base.fingerprint,
    ):
        note(
            f"warning: {corpus} was written by another model than {target}; acceptance on its own answers may differ",
            "yellow",
        )
    with meter(len(samples)) as progress:
        done = itertools.count(1)

        def show() -> None:
            progress.show(next(done), "answers")

        groups, hits = {}, {}
        for key, group in by_source(samples).items():
            if mode == "async":
                preparer = PackedDrafter(model, base.config.vocab_size, guess)
                groups[key], hits[key] = replay_outcomes(preparer, group, length, show)
            elif mode == "fused":
                groups[key] = replay_fused(model, group, length, show)
            else:
                groups[key] = replay(model, group, length, show, recall=True)
    record = {"mode": mode, **acceptance_record(groups, length, len(samples))}
    if mode != "serial":  # no outcome is guessed in fused mode; in async mode the hit rate says it
        del record["bonus_recall"]
    if mode == "async":
        record["guess_from"] = guess
        add_hits(record, hits)
        print_table(hit_table(record), error=True)
    typer.echo(json.dumps(record))


def _guess_from(mode: str, guess_from: str | None) -> GuessFrom:
    """Raises InvalidRequest for what does not exist, or not in this mode."""
    from d3d.drafting.packed_pass import GUESS_FROM
    from d3d.errors import InvalidRequest

    if mode == "auto":
        raise InvalidRequest(
            "mode: auto chooses by time, and a replay runs no target that could be timed; take serial, fused or async"
        )
    if mode not in MODES:
        raise InvalidRequest(f"mode: {mode!r} is not one of {', '.join(MODES)}")
    if guess_from is not None and mode != "async":
        raise InvalidRequest(
            f"--guess-from is for mode async; no outcome is guessed in mode {mode}; leave it out"
        )
    known = next((name for name in GUESS_FROM if name == (guess_from or GUESS_FROM[0])), None)
    if known is None:
        raise InvalidRequest(f"--guess-from {guess_from!r} is not one of {', '.join(GUESS_FROM)}")
    return known


def _draft_length(mode: str, model: DrafterModel, base: Transformer, wanted: int | None) -> int:
    """Raises InvalidRequest for a draft length or a mode that is not to be had with this
    drafter."""
    from d3d.decoding.modes import DEFAULT_DRAFT_LENGTH
    from d3d.drafting.fused import check_fused
    from d3d.errors import InvalidRequest

    longest = model.config.block_size
    if mode == "fused":
        check_fused(model, base)
        longest = model.config.longest_slot_draft
    if wanted is None:
        return min(longest, DEFAULT_DRAFT_LENGTH) if mode == "async" else longest
    if wanted > longest:
        raise InvalidRequest(
            f"draft length: {wanted} is above the most that the drafter can draft, {longest}"
        )
    return wanted
