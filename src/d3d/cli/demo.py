"""`d3d demo`: three questions, answered plainly and with the drafter in turn, with proof that the
ids are equal."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import typer

from d3d.cli import options as o
from d3d.config import SpeculativeChoice

if TYPE_CHECKING:
    from d3d.cli.options import ModelChoice
    from d3d.results import GenerationResult

QUESTIONS = (
    "A baker sells 24 rolls in the morning and twice as many in the afternoon. Each roll costs $2. "
    "How much money does the baker make?",
    "Write a Python function that returns the largest number in a list.",
    "What are three good habits for learning a new language?",
)


@o.takes(o.MODEL, o.sampling("max_tokens", max_tokens=160), o.SPECULATION)
def demo(*, choice: ModelChoice, sampling: dict[str, Any], speculation: SpeculativeChoice) -> None:
    """Answer three questions plainly and with the drafter (by the preset's method, else serial),
    and compare ids and times. In float32 unless --dtype says otherwise."""
    from d3d.cli.console import note
    from d3d.cli.show import stream_answer
    from d3d.engine.sampling import SamplingParams
    from d3d.errors import InvalidRequest
    from d3d.lab.bench.lossless import compare, summarise, tolerance

    if choice.dtype == "auto":
        choice = replace(choice, dtype="float32")
    with choice.load(speculation) as loaded:
        method = speculation.method or loaded.default_method
        if method == "plain":
            raise InvalidRequest(
                "the demo compares plain decoding with drafting, and this preset decodes plainly; "
                "take --model smollm2-135m"
            )
        plain, drafted = {"method": "plain"}, {"method": method, **speculation.options}
        warm_up = {"max_tokens": min(8, sampling["max_tokens"])}
        for options in (drafted, plain):  # not measured
            loaded.generate(QUESTIONS[0], **warm_up, **options)
        pairs: list[Pair] = []
        verdicts = []
        for question in QUESTIONS:
            typer.echo(f"\n{typer.style(question, bold=True)}")
            answers = []
            for options in (plain, drafted):
                typer.echo(typer.style(f"\n[{options['method']}]", dim=True))
                answers.append(stream_answer(loaded.stream(question, **sampling, **options)))
            pairs.append(Pair(question, answers[0], answers[1]))
            verdicts.append(
                compare(
                    loaded.parts.target,
                    loaded.encode(question),
                    (answers[0].token_ids, answers[1].token_ids),
                    SamplingParams(**sampling),
                    eos_token_ids=loaded.target.eos_token_ids,
                    largest_rounding=tolerance(loaded.target.dtype),
                )
            )
    typer.echo()
    title = f"{loaded.target.source}, {loaded.precision} on {loaded.device_name}, greedy"
    print_table(pairs, method, title)
    spoken = [pair.drafted.speculation for pair in pairs if pair.drafted.speculation]
    for warning in sorted({warning for each in spoken for warning in each.warnings}):
        note(f"warning: {warning}", "yellow")
    typer.echo(f"token-identical: {(answer := summarise(verdicts))}")
    if answer == "no":
        raise typer.Exit(1)


class Pair(NamedTuple):
    """One question's answers."""

    question: str
    plain: GenerationResult
    drafted: GenerationResult


def print_table(pairs: list[Pair], mode: str, title: str) -> None:
    """Print times and acceptance of every question, and of all tokens together."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(title))
    for heading in (
        "question",
        "tokens",
        "plain ms/token",
        f"{mode} ms/token",
        "ratio",
        "acceptance length",
    ):
        table.add_column(heading, justify="left" if heading == "question" else "right")
    for pair in pairs:
        table.add_row(Text(_short(pair.question)), *figures([pair]))
    table.add_section()
    table.add_row("all", *figures(pairs))
    Console().print(table)


def figures(pairs: list[Pair]) -> list[str]:
    """Tokens, milliseconds per further token of both modes, their ratio, and acceptance length; "-"
    for missing values."""
    speculations = [
        pair.drafted.speculation for pair in pairs if pair.drafted.speculation is not None
    ]
    rounds = sum(speculation.rounds for speculation in speculations)
    committed = sum(
        speculation.acceptance_length * speculation.rounds for speculation in speculations
    )
    plain, drafted = _tpot([pair.plain for pair in pairs]), _tpot([pair.drafted for pair in pairs])
    return [
        str(sum(pair.drafted.usage.completion_tokens for pair in pairs)),
        f"{1000 * plain:.1f}" if plain else "-",
        f"{1000 * drafted:.1f}" if drafted else "-",
        f"{plain / drafted:.2f}" if plain and drafted else "-",
        f"{committed / rounds:.2f}" if rounds else "-",
    ]


def _tpot(results: list[GenerationResult]) -> float:
    """Mean seconds per further token over several answers; 0 if none has two tokens."""
    further = [result.usage.completion_tokens - 1 for result in results]
    seconds = sum(
        (result.timing.tpot_s or 0.0) * count
        for result, count in zip(results, further, strict=True)
    )
    return seconds / sum(further) if sum(further) else 0.0


def _short(question: str) -> str:
    return question if len(question) < 40 else question[:37] + "..."
