"""Async mode on a real model: are its ids plain decoding's, with every placement, and with the
draft worker killed in the middle?

usage: python benchmarks/async_real.py PROMPTS.jsonl [--prompts 10] [--max-tokens 64] [--dtype
float32] [--temperature 0.8 --seed 1]
           [--placements thread processes] [--json FILE]

Each prompt is answered plainly, then in async mode with each placement, and once more with
`processes` while kill -9 ends the worker. Prints one line an answer and then one JSON object; the
exit status is 1 where an answer differs from plain decoding's, rounding aside."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import sys
from collections import Counter
from datetime import date
from pathlib import Path
from typing import Any

import torch

import d3d
from d3d.core.types import SamplingParams
from d3d.results import GenerationResult
from d3d.lab.bench.lossless import Divergence, compare, label, tolerance
from d3d.train.prompts import read_prompts

KILLED_AT = 3
"""The worker is killed when this many pieces of an answer are there."""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("prompts_file", type=Path)
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--drafter")
    parser.add_argument("--prompts", type=int, default=10)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--outcomes", type=int)
    parser.add_argument("--placements", nargs="+", default=["thread", "processes"])
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="another place for the JSON object")
    options = parser.parse_args()

    model = d3d.load(options.target, options.drafter, dtype=options.dtype, device=options.device)
    sampling: dict[str, Any] = {
        "max_tokens": options.max_tokens,
        "temperature": options.temperature,
    }
    if options.temperature:
        sampling["seed"] = options.seed
    ways = [(placement, False) for placement in options.placements]
    ways += [("processes", True)] if "processes" in options.placements else []
    report: dict[str, dict[str, Any]] = {name: _nothing() for name in map(_name, ways)}
    differs = False
    for number, prompt in enumerate(
        read_prompts(options.prompts_file, model.tokenizer)[: options.prompts]
    ):
        plain = model.generate(prompt.token_ids, mode="plain", **sampling)
        for placement, killed in ways:
            how = {
                "mode": "async",
                "placement": placement,
                "outcomes": options.outcomes,
                **sampling,
            }
            result, kills = _answer(model, prompt.token_ids, how, killed)
            divergence = compare(
                model.engine,
                prompt.token_ids,
                (plain.token_ids, result.token_ids),
                SamplingParams(**sampling),
                eos_token_ids=model.target.eos_token_ids,
                largest_rounding=tolerance(model.target.transformer.dtype),
            )
            differs |= divergence is not None and not divergence.is_rounding
            _add(report[_name((placement, killed))], result, divergence, kills)
            print(
                f"prompt {number}, {_name((placement, killed))}: {len(result.token_ids)} tokens, identical: {label(divergence)}",
                flush=True,
            )
    model.close()
    whole = {
        "ways": report,
        "settings": {
            key: str(value.name) if isinstance(value, Path) else value
            for key, value in vars(options).items()
        },
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads, torch {torch.__version__}",
        "date": date.today().isoformat(),
    }
    print(json.dumps(whole, indent=2))
    if options.json is not None:
        options.json.write_text(json.dumps(whole, indent=2) + "\n")
    return 1 if differs else 0


def _name(way: tuple[str, bool]) -> str:
    return way[0] + (", killed" if way[1] else "")


def _answer(
    model: d3d.Model, prompt: list[int], how: dict[str, Any], killed: bool
) -> tuple[GenerationResult, int]:
    """The answer, and how many workers were killed for it."""
    kills, result = 0, None
    for number, chunk in enumerate(model.stream(prompt, **how)):
        if killed and number == KILLED_AT:
            for child in multiprocessing.active_children():
                if child.name == "d3d-draft-worker":
                    child.kill()  # signal 9
                    kills += 1
        result = chunk.result
    assert result is not None, "the last chunk carries the result"
    return result, kills


def _nothing() -> dict[str, Any]:
    counts = ("answers", "tokens", "rounds", "drafted_rounds", "kills")
    return (
        {"identical": Counter()}
        | dict.fromkeys(counts, 0)
        | {"readiness": Counter(), "fallbacks": Counter(), "warnings": Counter()}
    )


def _add(
    row: dict[str, Any], result: GenerationResult, divergence: Divergence | None, kills: int
) -> None:
    row["identical"][label(divergence).split(" ")[0]] += 1
    row["answers"] += 1
    row["tokens"] += len(result.token_ids)
    row["rounds"] += len(result.rounds)
    row["drafted_rounds"] += sum(stats.draft_length > 0 for stats in result.rounds)
    row["kills"] += kills
    for stats in result.rounds:
        if stats.preparation is not None:
            row["readiness"][stats.preparation.readiness] += 1
            row["fallbacks"].update([stats.preparation.cause] if stats.preparation.cause else [])
    if result.speculation is not None:
        row["warnings"].update(
            "the draft process died" if " died" in warning else warning
            for warning in result.speculation.warnings
        )


if __name__ == "__main__":
    sys.exit(main())
