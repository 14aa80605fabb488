"""Tokens per second of several requests at once: plain, serial, fused and async, by batch size.

usage: python studies/batches.py PROMPTS.jsonl [--prompts 16] [--max-tokens 128] [--batches 1 2 4 8]
           [--modes plain serial fused async] [--placement thread] [--dtype bfloat16] [--json FILE]

Prompts are taken in groups of twice the largest batch. Each group is answered in every mode with
every batch before the next group, in an order that moves on by one, so that heat and other programs
affect all of them. Prints a table and one JSON object: tokens of all answers over the wall time of
`generate_many`, prompts included; seconds to the first token, waiting for a place included;
acceptance length; and how many answers have the ids of plain decoding one by one. Run it on an idle
machine."""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import d3d
from d3d.api import Model
from d3d.engine import metrics
from d3d.lab.report.tables import Table, markdown
from d3d.results import GenerationResult
from shared import add_model_options, add_prompt_options, make_parser, origin, prompts_of

MODES = ("plain", "serial", "fused", "async")

Way = tuple[str, int]
"""A mode and a batch size."""


@dataclass
class Total:
    """All answers of one way."""

    seconds: float = 0.0
    answers: list[GenerationResult] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        return sum(answer.usage.completion_tokens for answer in self.answers)

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds

    def figures(self, reference: Total) -> dict[str, Any]:
        drafted = [answer for answer in self.answers if answer.speculation is not None]
        rounds = [round_ for answer in drafted for round_ in answer.rounds]
        rates = [metrics.hit_rate(answer.rounds) for answer in drafted]
        hits = [rate for rate in rates if rate is not None]
        pairs = zip(self.answers, reference.answers, strict=True)
        return {
            "tokens_per_s": round(self.tokens_per_s, 2),
            "ratio": round(self.tokens_per_s / reference.tokens_per_s, 3),
            "ttft_s": round(statistics.median(answer.timing.ttft_s for answer in self.answers), 4),
            "acceptance_length": round(metrics.acceptance_length(rounds), 3) if rounds else None,
            "hit_rate": round(statistics.mean(hits), 3) if hits else None,
            "identical": sum(answer.token_ids == plain.token_ids for answer, plain in pairs),
            "tokens": self.tokens,
        }


def main() -> None:
    options = arguments()
    model = d3d.load(options.target, options.drafter, dtype=options.dtype, device=options.device)
    prompts = prompts_of(options, model)
    totals = measure(model, prompts, options)
    model.close()
    figures = {way: total.figures(totals["plain", 1]) for way, total in totals.items()}
    print(markdown(table(figures, options)))
    ways = [{"mode": mode, "batch": batch, **row} for (mode, batch), row in figures.items()]
    text = json.dumps({"ways": ways, "prompts": len(prompts), **origin(options)}, indent=2)
    print(text)
    if options.json is not None:
        options.json.write_text(text + "\n", encoding="utf-8")


def arguments() -> argparse.Namespace:
    parser = make_parser(__doc__)
    add_prompt_options(parser, prompts=16, max_tokens=128)
    add_model_options(parser)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--modes", nargs="+", default=list(MODES))
    parser.add_argument("--draft-length", type=int, help="of serial, fused and async mode")
    parser.add_argument("--placement", default="thread", help="of async mode's draft worker")
    parser.add_argument("--outcomes", type=int, help="of async mode")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="file for the JSON object, too")
    return parser.parse_args()


def measure(
    model: Model, prompts: list[list[int]], options: argparse.Namespace
) -> dict[Way, Total]:
    """Plain decoding one by one is always included: the others are compared with it."""
    pairs = [(mode, batch) for mode in options.modes for batch in options.batches]
    ways = list(dict.fromkeys([("plain", 1), *pairs]))
    totals = {way: Total() for way in ways}
    for mode, batch in ways:  # warm-up, not measured
        short = sampling(mode, options) | {"max_tokens": 8}
        model.generate_many(prompts[:batch], max_batch=batch, **short)
    group = 2 * max(options.batches)
    for number, start in enumerate(range(0, len(prompts), group)):
        turn = number % len(ways)
        for mode, batch in ways[turn:] + ways[:turn]:
            started = time.perf_counter()
            answers = model.generate_many(
                prompts[start : start + group], max_batch=batch, **sampling(mode, options)
            )
            totals[mode, batch].seconds += time.perf_counter() - started
            totals[mode, batch].answers += answers
    return totals


def sampling(mode: str, options: argparse.Namespace) -> dict[str, Any]:
    """Options of `generate_many`."""
    fields: dict[str, Any] = {
        "mode": mode,
        "max_tokens": options.max_tokens,
        "temperature": options.temperature,
    }
    if options.temperature:
        fields["seed"] = options.seed
    if mode != "plain":
        fields["draft_length"] = options.draft_length
    if mode == "async":
        fields |= {"placement": options.placement, "outcomes": options.outcomes}
    return fields


def table(figures: dict[Way, dict[str, Any]], options: argparse.Namespace) -> Table:
    modes = list(dict.fromkeys(mode for mode, _ in figures))
    batches = sorted({batch for _, batch in figures})

    def cell(mode: str, batch: int) -> str | None:
        row = figures.get((mode, batch))
        return None if row is None else f"{row['tokens_per_s']} ({row['ratio']})"

    return Table(
        f"{options.target}, {options.dtype}: tokens per second of all requests together, and in "
        "brackets over plain one by one",
        ("batch", *modes),
        tuple((batch, *(cell(mode, batch) for mode in modes)) for batch in batches),
    )


if __name__ == "__main__":
    main()
