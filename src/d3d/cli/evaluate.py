"""`d3d evaluate`: acceptance of a drafter on recorded answers, without running the target."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from d3d.cli.options import DeviceOption, DTypeOption

if TYPE_CHECKING:
    from d3d.models.drafter import DrafterModel
    from d3d.models.transformer import Transformer
    from d3d.training.acceptance import Acceptance


def evaluate(
    drafter: Annotated[str, typer.Argument(help="Drafter: directory, hub id or preset.")],
    corpus: Annotated[Path, typer.Argument(help="Recorded answers, made by `d3d data` of prompts that were not trained on.")],
    target: Annotated[str, typer.Option(help="Preset, directory, GGUF file or hub id of the target.")] = "smollm2-135m",
    mode: Annotated[str, typer.Option(help="serial or fused: how rounds are replayed.")] = "serial",
    draft_length: Annotated[
        int | None, typer.Option(help="Tokens to draft a round; by default the block size, in fused mode one fewer.", min=1)
    ] = None,
    limit: Annotated[int | None, typer.Option(help="Most answers to replay.", min=1)] = None,
    device: DeviceOption = "auto",
    dtype: DTypeOption = "auto",
) -> None:
    """Replay rounds against recorded answers, greedy or sampled; prints one JSON object."""
    from d3d.cli.console import meter, note
    from d3d.core.errors import InvalidRequest
    from d3d.models.checkpoint import load_drafter, read_config
    from d3d.models.fingerprint import tokenizer_fingerprint
    from d3d.models.linear import pack_weights
    from d3d.models.loading import resolve_drafter
    from d3d.models.open_model import open_model
    from d3d.training.corpus import corpus_files, corpus_identity, read_corpus
    from d3d.training.evaluate import by_source, replay, replay_fused

    directory = resolve_drafter(drafter)
    read_config(directory)
    base = open_model(target, device=device, dtype=dtype)
    model = load_drafter(directory, base)
    pack_weights(base.transformer, model)
    samples = read_corpus(corpus, tokenizer_fingerprint(base.tokenizer))[:limit]
    if not any(len(sample.answer_ids) > 1 for sample in samples):
        raise InvalidRequest(f"{corpus}: no answer of two tokens or more, so nothing can be measured")
    longest = _longest_draft(mode, model, base.transformer)
    length = longest if draft_length is None else draft_length
    if length > longest:
        raise InvalidRequest(f"draft length: {length} is above the most that the drafter can draft, {longest}")
    if corpus_identity(corpus_files(corpus)[0]).get("target_fingerprint") not in (None, base.fingerprint):
        note(f"warning: {corpus} was written by another model than {target}; acceptance on its own answers may differ", "yellow")
    with meter(len(samples)) as progress:
        done = itertools.count(1)

        def show() -> None:
            progress.show(next(done), "answers")

        if mode == "fused":
            groups = {key: replay_fused(model, group, length, show) for key, group in by_source(samples).items()}
        else:
            groups = {key: replay(model, group, length, show, recall=True) for key, group in by_source(samples).items()}
    record = {"mode": mode, **_record(groups, length, len(samples))}
    if mode == "fused":  # no outcome is guessed there
        del record["bonus_recall"]
    typer.echo(json.dumps(record))


def _longest_draft(mode: str, model: DrafterModel, base: Transformer) -> int:
    """Raises InvalidRequest for a mode that does not exist, or not with this drafter."""
    from d3d.core.errors import InvalidRequest
    from d3d.drafting.fused import check_fused

    if mode not in ("serial", "fused"):
        raise InvalidRequest(f"mode: {mode!r} is not one of serial, fused")
    if mode == "serial":
        return model.config.block_size
    check_fused(model, base)
    return model.config.longest_slot_draft


def _record(groups: dict[tuple[str, float], Acceptance], draft_length: int, answers: int) -> dict[str, Any]:
    """`groups`: rounds by source and temperature."""
    from d3d.training.acceptance import total

    whole = total(draft_length, groups.values())
    sources = {name: [group for (source, _), group in groups.items() if source == name] for name, _ in sorted(groups)}
    by_temperature = {f"{key:g}": [group for (_, at), group in groups.items() if at == key] for key in sorted({at for _, at in groups})}
    return {
        "answers": answers,
        "draft_length": draft_length,
        "rounds": whole.rounds,
        "acceptance_length": whole.acceptance_length,
        "acceptance_length_macro": whole.acceptance_length_macro,
        "acceptance_at": whole.acceptance_at,
        "num_accepted_histogram": whole.histogram,
        "bonus_recall": {str(top): recall for top, recall in whole.bonus_recall.items()},
        "by_source": {name: _short(total(draft_length, parts)) for name, parts in sources.items()},
        "by_temperature": {name: _short(total(draft_length, parts)) for name, parts in by_temperature.items()},
    }


def _short(acceptance: Acceptance) -> dict[str, Any]:
    return {
        "answers": acceptance.answers,
        "rounds": acceptance.rounds,
        "acceptance_length": acceptance.acceptance_length,
        "acceptance_length_macro": acceptance.acceptance_length_macro,
    }
