"""`d3d evaluate`: acceptance of a drafter on recorded answers, without running the target."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from d3d.cli import options as o
from d3d.json_text import to_json

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from d3d.hub.open_model import OpenModel
    from d3d.lab.report.tables import Table
    from d3d.methods.async_.packed_pass import GuessFrom
    from d3d.model.drafter import DrafterModel
    from d3d.model.transformer import Transformer
    from d3d.train.acceptance import HitCounts, RoundCounts
    from d3d.train.corpus import Sample

MODES = ("serial", "fused", "async")

Key = tuple[str, float]
"""Source and temperature of answers."""


@o.takes(o.TARGET)
def evaluate(
    *,
    drafter: Annotated[
        str, typer.Argument(help="Drafter: directory, hub id, preset or preset file.")
    ],
    corpus: Annotated[
        Path,
        typer.Argument(
            help="Recorded answers, made by `d3d data` of prompts that were not trained on."
        ),
    ],
    mode: Annotated[
        str,
        typer.Option(
            "--method",
            "--mode",
            help="Method whose rounds are replayed: serial, fused or async; async adds the hit "
            "rate.",
        ),
    ] = "serial",
    draft_length: Annotated[
        int | None,
        typer.Option(
            help="Tokens to draft per round; by default the block size, with fused one fewer, "
            "with async 5.",
            min=1,
        ),
    ] = None,
    guess_from: Annotated[
        str | None,
        typer.Option(
            help="Async: source of the guesses of bonus tokens: block (default) or clean_rows."
        ),
    ] = None,
    limit: Annotated[int | None, typer.Option(help="Most answers to replay.", min=1)] = None,
    device: o.DeviceOption = "auto",
    dtype: o.DTypeOption = "auto",
    quantize: o.QuantizeOption = None,
    model: str | None,
) -> None:
    """Replay rounds on recorded answers, greedy or sampled; prints one JSON object."""
    from d3d.cli.console import note
    from d3d.cli.tables import print_table
    from d3d.errors import InvalidRequest
    from d3d.hub.checkpoint import read_config
    from d3d.hub.fingerprint import tokenizer_fingerprint
    from d3d.hub.names import resolve_drafter
    from d3d.hub.open_drafter import ready_drafters
    from d3d.hub.open_model import open_model
    from d3d.hub.presets import is_preset_file
    from d3d.loader import preset_of
    from d3d.train.corpus import corpus_files, corpus_identity, read_corpus

    directory = resolve_drafter(drafter)
    read_config(directory)
    guess = _guess_from(mode, guess_from)
    target = model or (drafter if is_preset_file(drafter) else o.DEFAULT_MODEL)
    preset = preset_of(target)
    if quantize is None and preset is not None:
        quantize = preset[0].quantize
    base = open_model(target, device=device, dtype=dtype, quantize=quantize)
    (ready,) = ready_drafters(base, [directory])
    identity = tokenizer_fingerprint(base.tokenizer)
    samples = read_corpus(corpus, identity, base.vocab_size)[:limit]
    if not any(len(sample.answer_ids) > 1 for sample in samples):
        raise InvalidRequest(
            f"{corpus}: no answer of two tokens or more, so nothing can be measured"
        )
    length = _draft_length(mode, ready, base.transformer, draft_length)
    author = corpus_identity(corpus_files(corpus)[0]).get("target_fingerprint")
    if author not in (None, base.fingerprint):
        note(
            f"warning: {corpus} was written by another model than {target}; acceptance on its own "
            "answers may differ",
            "yellow",
        )
    record = _replayed(mode, ready, base, samples, length, guess)
    if mode == "async":
        print_table(_hit_table(record), error=True)
    typer.echo(to_json(record))


def _replayed(
    mode: str,
    model: DrafterModel,
    base: OpenModel,
    samples: list[Sample],
    draft_length: int,
    guess: GuessFrom,
) -> dict[str, Any]:
    """JSON record that the command prints."""
    from d3d.cli.console import meter
    from d3d.train.replay import by_source

    groups, hits = {}, {}
    done = itertools.count(1)
    with meter(len(samples)) as progress:

        def show() -> None:
            progress.show(next(done), "answers")

        for key, group in by_source(samples).items():
            groups[key], hits[key] = _replay(mode, model, base, group, draft_length, guess, show)
    record = {"mode": mode, **_acceptance_record(groups, draft_length, len(samples))}
    if mode != "serial":  # fused mode guesses no outcome, and async mode has the hit rate
        del record["bonus_recall"]
    if mode == "fused":
        record["is_upper_bound"] = True  # every row has slots, as if rows cost nothing
    if mode == "async":
        record["guess_from"] = guess
        _add_hits(record, {key: counts for key, counts in hits.items() if counts is not None})
    return record


def _replay(
    mode: str,
    model: DrafterModel,
    base: OpenModel,
    samples: list[Sample],
    draft_length: int,
    guess: GuessFrom,
    on_sample: Callable[[], None],
) -> tuple[RoundCounts, HitCounts | None]:
    """Counts of the rounds, and in async mode of the hits."""
    from d3d.methods.async_.packed_pass import PackedDrafter
    from d3d.train.replay import replay, replay_fused, replay_outcomes

    ends = base.eos_token_ids
    if mode == "async":
        preparer = PackedDrafter(model, base.num_tokens, guess)
        return replay_outcomes(preparer, samples, draft_length, on_sample, ends=ends)
    if mode == "fused":
        return replay_fused(model, samples, draft_length, on_sample, ends=ends), None
    return replay(model, samples, draft_length, on_sample, ends=ends, recall=True), None


def _guess_from(mode: str, guess_from: str | None) -> GuessFrom:
    """The source of guesses. Raises InvalidRequest for an unknown one, or if the mode has none."""
    from d3d.errors import InvalidRequest
    from d3d.methods.async_.packed_pass import GUESS_FROM

    if mode == "auto":
        raise InvalidRequest(
            "method: auto chooses by time, and a replay runs no target that could be timed; take "
            "serial, fused or async"
        )
    if mode not in MODES:
        raise InvalidRequest(f"method: {mode!r} is not one of {', '.join(MODES)}")
    if guess_from is not None and mode != "async":
        raise InvalidRequest(
            f"--guess-from is for mode async; no outcome is guessed in mode {mode}; leave it out"
        )
    known = next((name for name in GUESS_FROM if name == (guess_from or GUESS_FROM[0])), None)
    if known is None:
        raise InvalidRequest(f"--guess-from {guess_from!r} is not one of {', '.join(GUESS_FROM)}")
    return known


def _draft_length(mode: str, model: DrafterModel, base: Transformer, wanted: int | None) -> int:
    """Tokens to draft per round. Raises InvalidRequest for a length or a mode that the drafter does
    not support."""
    from d3d.errors import InvalidRequest
    from d3d.methods.base import DEFAULT_DRAFT_LENGTH
    from d3d.methods.fused.engine import check_fused

    longest = model.config.block_size
    if mode == "fused":
        check_fused(model, base)
        longest = model.config.longest_slot_draft
    if wanted is None:
        return min(longest, DEFAULT_DRAFT_LENGTH) if mode == "async" else longest
    if wanted > longest:
        raise InvalidRequest(
            f"draft_length: {wanted} is above the most that the drafter can draft, {longest}"
        )
    return wanted


def _acceptance_record(
    groups: dict[Key, RoundCounts], draft_length: int, answers: int
) -> dict[str, Any]:
    """Acceptance of all rounds, by source and by temperature, ready for JSON."""
    from d3d.train.acceptance import total

    whole = total(draft_length, groups.values())
    sources = {
        name: [group for (source, _), group in groups.items() if source == name]
        for name, _ in sorted(groups)
    }
    by_temperature = {
        f"{key:g}": [group for (_, at), group in groups.items() if at == key]
        for key in sorted({at for _, at in groups})
    }
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
        "by_temperature": {
            name: _short(total(draft_length, parts)) for name, parts in by_temperature.items()
        },
    }


def _add_hits(record: dict[str, Any], hits: dict[Key, HitCounts]) -> None:
    """Add hit rates of all rounds, by source and by temperature."""
    from d3d.train.acceptance import total_hits

    record |= total_hits(hits.values()).to_dict()
    for name, part in record["by_source"].items():
        part["hit_rate"] = _rates(hit for (source, _), hit in hits.items() if source == name)
    for name, part in record["by_temperature"].items():
        part["hit_rate"] = _rates(hit for (_, at), hit in hits.items() if f"{at:g}" == name)


def _hit_table(record: dict[str, Any]) -> Table:
    """Hit rate by outcome budget, of all rounds and by the verdict's num_accepted."""
    from d3d.lab.report.tables import Table, number

    wanting = record["rounds_wanting"]
    headings = ("outcomes", "hit rate", *(f"{kept} accepted" for kept in range(len(wanting))))
    rows = [("rounds", str(sum(wanting)), *map(str, wanting))]
    for budget, rate in record["hit_rate"].items():
        by_kept = (number(at) or "-" for at in record["hit_rate_at"][budget])
        rows.append((budget, number(rate, 3) or "-", *by_kept))
    title = f"Hit rate, acceptance length {record['acceptance_length']:.2f}"
    return Table(title, headings, tuple(rows))


def _rates(hits: Iterable[HitCounts]) -> dict[str, float | None]:
    from d3d.train.acceptance import total_hits

    return {str(budget): rate for budget, rate in total_hits(hits).hit_rate.items()}


def _short(counts: RoundCounts) -> dict[str, Any]:
    return {
        "answers": counts.answers,
        "rounds": counts.rounds,
        "acceptance_length": counts.acceptance_length,
        "acceptance_length_macro": counts.acceptance_length_macro,
    }
