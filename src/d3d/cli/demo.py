"""`d3d demo`: three questions, answered plainly and with the drafter in turn, and the proof that the ids are equal."""

from __future__ import annotations

import typer

from d3d.cli import options as o

QUESTIONS = (
    "A baker sells 24 rolls in the morning and twice as many in the afternoon. Each roll costs $2. How much money does the baker make?",
    "Write a Python function that returns the largest number in a list.",
    "What are three good habits for learning a new language?",
)


def demo(
    model: o.ModelOption = None,
    max_tokens: o.MaxTokensOption = 160,
    draft_length: o.DraftLengthOption = None,
    device: o.DeviceOption = "auto",
    dtype: o.DTypeOption = "float32",
) -> None:
    """Answer three questions in plain and in serial mode, and compare ids and times."""
    from rich.console import Console
    from rich.table import Table

    from d3d.benchmarks.lossless import compare, summarise, tolerance
    from d3d.cli.console import stderr
    from d3d.cli.show import stream_answer
    from d3d.core.types import SamplingParams

    loaded = o.ModelChoice(model, None, None, "serial", device, dtype).load()
    console = Console()
    with stderr().status("warming up"):
        for mode in ("plain", "serial"):
            loaded.generate(QUESTIONS[0], mode=mode, draft_length=draft_length, max_tokens=8)
    table = Table(title=f"{loaded.target.source}, {loaded.dtype_name} on {loaded.device_name}, greedy")
    for heading in ("question", "tokens", "plain ms/token", "serial ms/token", "ratio", "acceptance length"):
        table.add_column(heading, justify="left" if heading == "question" else "right")
    totals = {"plain": 0.0, "serial": 0.0}
    tokens = rounds = committed = 0
    verdicts = []
    for question in QUESTIONS:
        console.print(f"\n[bold]{question}[/bold]")
        plain = loaded.generate(question, mode="plain", max_tokens=max_tokens)
        serial = stream_answer(loaded.stream(question, mode="serial", draft_length=draft_length, max_tokens=max_tokens), console)
        verdicts.append(
            compare(
                loaded.engine,
                loaded.encode(question),
                (plain.token_ids, serial.token_ids),
                SamplingParams(max_tokens=max_tokens),
                eos_token_ids=loaded.target.eos_token_ids,
                largest_rounding=tolerance(loaded.target.transformer.dtype),
            )
        )
        plain_s, serial_s = plain.timing.tpot_s or 0.0, serial.timing.tpot_s or 0.0
        assert serial.speculation is not None
        further = serial.usage.completion_tokens - 1
        totals["plain"] += plain_s * (plain.usage.completion_tokens - 1)
        totals["serial"] += serial_s * further
        tokens, rounds = tokens + further, rounds + serial.speculation.rounds
        committed += round(serial.speculation.acceptance_length * serial.speculation.rounds)
        table.add_row(
            question if len(question) < 40 else question[:37] + "...",
            str(serial.usage.completion_tokens),
            f"{1000 * plain_s:.1f}",
            f"{1000 * serial_s:.1f}",
            f"{plain_s / serial_s:.2f}",
            f"{serial.speculation.acceptance_length:.2f}",
        )
    plain_ms, serial_ms = 1000 * totals["plain"] / tokens, 1000 * totals["serial"] / tokens
    table.add_section()
    table.add_row(
        "all",
        str(tokens + len(QUESTIONS)),
        f"{plain_ms:.1f}",
        f"{serial_ms:.1f}",
        f"{plain_ms / serial_ms:.2f}",
        f"{committed / rounds:.2f}",
    )
    console.print()
    console.print(table)
    typer.echo(f"token-identical: {summarise(verdicts)}")
