"""Tokens per second of several requests at once: plain, serial, fused and async, by the size of the
batch.

usage: python benchmarks/batches.py PROMPTS.jsonl [--prompts 16] [--max-tokens 128] [--batches 1 2 4
8] [--modes plain serial fused async]
           [--placement thread] [--dtype bfloat16] [--json FILE]

Prompts are taken in groups of twice the largest batch. Each group is answered in every mode with
every batch before the next one's turn comes, in an order that moves on by one, so that heat and
other programs meet all of them. Prints a table and one JSON object: tokens of all answers over the
wall time of `generate_many`, prompts included; seconds to the first token, which for those that
wait for a place is long; acceptance length; and how many answers have the ids of plain decoding one
by one. Run it on an idle machine."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

import torch

import d3d
from d3d.api import Model
from d3d.decoding.many import MODES_OF_MANY
from d3d.results import GenerationResult
from d3d.lab.report.tables import Table, markdown
from d3d.train.prompts import read_prompts

Way = tuple[str, int]
"""A mode and a batch."""


@dataclass
class Total:
    """What one way has come to."""

    seconds: float = 0.0
    answers: list[GenerationResult] = field(default_factory=list)

    def figures(self, reference: Total) -> dict[str, Any]:
        spoken = [answer.speculation for answer in self.answers if answer.speculation is not None]
        rounds = sum(each.rounds for each in spoken)
        hits = [
            each.overlap.hit_rate
            for each in spoken
            if each.overlap is not None and each.overlap.hit_rate is not None
        ]
        return {
            "tokens_per_s": round(self.tokens_per_s, 2),
            "ratio": round(self.tokens_per_s / reference.tokens_per_s, 3),
            "ttft_s": round(statistics.median(answer.timing.ttft_s for answer in self.answers), 4),
            "acceptance_length": round(
                sum(each.acceptance_length * each.rounds for each in spoken) / rounds, 3
            )
            if rounds
            else None,
            "hit_rate": round(statistics.mean(hits), 3) if hits else None,
            "identical": sum(
                one.token_ids == other.token_ids
                for one, other in zip(self.answers, reference.answers, strict=True)
            ),
            "tokens": sum(answer.usage.completion_tokens for answer in self.answers),
        }

    @property
    def tokens_per_s(self) -> float:
        return sum(answer.usage.completion_tokens for answer in self.answers) / self.seconds


def main() -> None:
    options = arguments()
    model = d3d.load(options.target, options.drafter, dtype=options.dtype, device=options.device)
    prompts = [
        prompt.token_ids
        for prompt in read_prompts(options.prompts_file, model.tokenizer)[: options.prompts]
    ]
    totals = measure(model, prompts, options)
    model.close()
    figures = {way: total.figures(totals["plain", 1]) for way, total in totals.items()}
    print(markdown(table(figures, options)))
    report = {
        "ways": [{"mode": mode, "batch": batch, **row} for (mode, batch), row in figures.items()],
        "prompts": len(prompts),
        "settings": vars(options) | {"prompts_file": options.prompts_file.name, "json": None},
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads, torch {torch.__version__}",
        "date": date.today().isoformat(),
    }
    text = json.dumps(report, indent=2)
    print(text)
    if options.json is not None:
        options.json.write_text(text + "\n", encoding="utf-8")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("prompts_file", type=Path)
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--drafter")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--modes", nargs="+", default=list(MODES_OF_MANY), choices=MODES_OF_MANY)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--draft-length", type=int, help="of serial, fused and async mode")
    parser.add_argument("--placement", default="thread", help="of async mode, as what follows")
    parser.add_argument("--outcomes", type=int)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="another place for the JSON object")
    return parser.parse_args()


def measure(
    model: Model, prompts: list[list[int]], options: argparse.Namespace
) -> dict[Way, Total]:
    """Plain decoding one by one is always among them: the others are compared with it."""
    ways = list(
        dict.fromkeys(
            [("plain", 1), *((mode, batch) for mode in options.modes for batch in options.batches)]
        )
    )
    totals = {way: Total() for way in ways}
    for mode, batch in ways:  # warm-up, not measured
        model.generate_many(
            prompts[:batch], max_batch=batch, **asked(mode, options) | {"max_tokens": 8}
        )
    group = 2 * max(options.batches)
    for number, start in enumerate(range(0, len(prompts), group)):
        turn = number % len(ways)
        for mode, batch in ways[turn:] + ways[:turn]:
            started = time.perf_counter()
            answers = model.generate_many(
                prompts[start : start + group], max_batch=batch, **asked(mode, options)
            )
            totals[mode, batch].seconds += time.perf_counter() - started
            totals[mode, batch].answers += answers
    return totals


def asked(mode: str, options: argparse.Namespace) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "mode": mode,
        "max_tokens": options.max_tokens,
        "temperature": options.temperature,
    }
    if options.temperature:
        fields["seed"] = options.seed
    if mode != "plain":
        fields["draft_length"] = options.draft_length
    return fields | (
        {"placement": options.placement, "outcomes": options.outcomes} if mode == "async" else {}
    )


def table(figures: dict[Way, dict[str, Any]], options: argparse.Namespace) -> Table:
    modes = list(dict.fromkeys(mode for mode, _ in figures))
    batches = sorted({batch for _, batch in figures})

    def cell(mode: str, batch: int) -> str | None:
        row = figures.get((mode, batch))
        return None if row is None else f"{row['tokens_per_s']} ({row['ratio']})"

    return Table(
        f"{options.target}, {options.dtype}: tokens per second of all requests together, and in brackets over plain one by one",
        ("batch", *modes),
        tuple((batch, *(cell(mode, batch) for mode in modes)) for batch in batches),
    )


if __name__ == "__main__":
    main()
