"""Async mode on a real model: are its ids plain decoding's, with every placement, and with the
draft worker killed midway?

usage: python studies/async_real.py PROMPTS.jsonl [--prompts 10] [--max-tokens 64]
           [--dtype float32] [--temperature 0.8 --seed 1] [--placements thread processes]
           [--json FILE]

Each prompt is answered plainly, then in async mode with each placement, and once more with
`processes` while kill -9 ends the worker. Prints a line for each answer and then one JSON object;
the exit status is 1 if an answer differs from plain decoding's by more than rounding."""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import d3d
from d3d.engine.params import SamplingParams
from d3d.lab.bench.lossless import Divergence, compare, label, tolerance
from d3d.methods.async_.workers import ProcessWorker
from d3d.results import GenerationResult
from shared import add_model_options, add_prompt_options, make_parser, origin, prompts_of

KILLED_AT = 3
"""Pieces of an answer after which the worker is killed."""
COUNTS = ("answers", "tokens", "rounds", "drafted_rounds", "kills")
TALLIES = ("identical", "readiness", "fallbacks", "warnings")


def main() -> int:
    options = arguments()
    model = d3d.load(options.target, options.drafter, dtype=options.dtype, device=options.device)
    sampling: dict[str, Any] = {
        "max_tokens": options.max_tokens,
        "temperature": options.temperature,
    }
    if options.temperature:
        sampling["seed"] = options.seed
    ways = {placement: (placement, False) for placement in options.placements}
    if "processes" in ways:
        ways["processes, killed"] = ("processes", True)
    report: dict[str, dict[str, Any]] = {
        name: dict.fromkeys(COUNTS, 0) | {tally: Counter() for tally in TALLIES} for name in ways
    }
    differs = False
    for number, prompt in enumerate(prompts_of(options, model)):
        plain = model.generate(prompt, mode="plain", **sampling)
        for name, (placement, killed) in ways.items():
            how = {"mode": "async", "placement": placement, "outcomes": options.outcomes}
            result, kills = answer(model, prompt, how | sampling, killed)
            divergence = compare(
                model.parts.target,
                prompt,
                (plain.token_ids, result.token_ids),
                SamplingParams(**sampling),
                eos_token_ids=model.target.eos_token_ids,
                largest_rounding=tolerance(model.target.dtype),
            )
            differs |= divergence is not None and not divergence.is_rounding
            add(report[name], result, divergence, kills)
            told = f"{len(result.token_ids)} tokens, identical: {label(divergence)}"
            print(f"prompt {number}, {name}: {told}", flush=True)
    model.close()
    text = json.dumps({"ways": report, **origin(options)}, indent=2)
    print(text)
    if options.json is not None:
        options.json.write_text(text + "\n")
    return 1 if differs else 0


def arguments() -> argparse.Namespace:
    parser = make_parser(__doc__)
    add_prompt_options(parser, prompts=10, max_tokens=64)
    add_model_options(parser, dtype="float32")
    parser.add_argument("--outcomes", type=int)
    parser.add_argument("--placements", nargs="+", default=["thread", "processes"])
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="file for the JSON object, too")
    return parser.parse_args()


def answer(
    model: d3d.Model, prompt: list[int], how: dict[str, Any], killed: bool
) -> tuple[GenerationResult, int]:
    """The answer, and how many workers were killed for it."""
    kills, result = 0, None
    for number, chunk in enumerate(model.stream(prompt, **how)):
        if killed and number == KILLED_AT:
            for running in model.parts.workers.values():
                worker = running.coordinator.link.worker
                if isinstance(worker, ProcessWorker):
                    worker.process.kill()  # signal 9
                    kills += 1
        result = chunk.result
    assert result is not None, "the last chunk carries the result"
    return result, kills


def add(
    row: dict[str, Any], result: GenerationResult, divergence: Divergence | None, kills: int
) -> None:
    row["identical"][label(divergence).split(" ")[0]] += 1
    row["answers"] += 1
    row["tokens"] += len(result.token_ids)
    row["rounds"] += len(result.rounds)
    row["drafted_rounds"] += sum(round_.draft_length > 0 for round_ in result.rounds)
    row["kills"] += kills
    for round_ in result.rounds:
        if round_.preparation is not None:
            row["readiness"][round_.preparation.readiness] += 1
            row["fallbacks"].update(filter(None, [round_.preparation.cause]))
    if result.speculation is not None:
        row["warnings"].update(
            "the draft process died" if " died" in warning else warning
            for warning in result.speculation.warnings
        )


if __name__ == "__main__":
    sys.exit(main())
