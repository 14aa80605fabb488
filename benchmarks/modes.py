"""Plain, serial and fused decoding: same engine, weights, dtype and prompts, alternating prompt by
prompt.

usage: python benchmarks/modes.py PROMPTS.jsonl [--prompts 20] [--max-tokens 192] [--dtype bfloat16]
[--draft-lengths 2 4 6]
       [--draft-confidences 0 0.1] [--lookups 0 2] [--least-kept 0 0.8] [--rows 6 12] [--over
       "serial 4 lookup 2"]

Prints one JSON object: milliseconds a token of plain, of serial at each draft length with each cut,
lookup and pause, of fused at each budget of rows with each lookup (0 is without); how many times as
fast each is as plain, or as the way that `--over` names, with its 95 % interval over the prompts;
acceptance length, tokens and slots of a verification, and how many answers are identical. Ratios
are of totals over all prompts. Run it on an idle machine."""

from __future__ import annotations

import argparse
import json
import os
import platform
from datetime import date
from itertools import product
from pathlib import Path
from typing import Any

import torch

import d3d
from d3d.core.types import SamplingParams
from d3d.lab.bench.lossless import compare, label, tolerance
from d3d.lab.stats import paired_ratio
from d3d.train.prompts import read_prompts


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("prompts_file", type=Path)
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--drafter")
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--max-tokens", type=int, default=192)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--quantize", help="int8")
    parser.add_argument(
        "--draft-lengths", type=int, nargs="*", default=[2, 3, 4, 6, 8], help="of serial mode"
    )
    parser.add_argument(
        "--draft-confidences", type=float, nargs="+", default=[0], help="of serial mode"
    )
    parser.add_argument(
        "--lookups", type=int, nargs="+", default=[0], help="of serial and fused mode"
    )
    parser.add_argument("--least-kept", type=float, nargs="+", default=[0], help="of serial mode")
    parser.add_argument("--rows", type=int, nargs="*", default=[6, 9, 12, 16], help="of fused mode")
    parser.add_argument("--over", default="plain", help="the way that ratios are taken to")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()

    ways: dict[str, dict[str, Any]] = {"plain": {"mode": "plain"}}
    for length, *extras in product(
        options.draft_lengths, options.draft_confidences, options.lookups, options.least_kept
    ):
        ways |= _way(
            "serial",
            "draft_length",
            length,
            dict(zip(("draft_confidence", "lookup", "least_kept"), extras, strict=True)),
        )
    for rows, lookup in product(options.rows, options.lookups):
        ways |= _way("fused", "rows", rows, {"lookup": lookup})
    if options.over not in ways:
        parser.error(f"--over {options.over!r} is not one of {', '.join(ways)}")
    model = d3d.load(
        options.target,
        options.drafter,
        dtype=options.dtype,
        device=options.device,
        quantize=options.quantize,
    )
    prompts = [
        prompt.token_ids
        for prompt in read_prompts(options.prompts_file, model.tokenizer)[: options.prompts]
    ]
    sampling = {
        "max_tokens": options.max_tokens,
        "temperature": options.temperature,
        "seed": options.seed,
    }
    for way in ways.values():  # warm-up, not measured
        model.generate(prompts[0], **way, **sampling | {"max_tokens": 16})
    rows: dict[str, dict[str, Any]] = {
        name: {
            "times": [],
            "rounds": 0,
            "committed": 0.0,
            "undrafted": 0,
            "copied": 0,
            "drafted": 0,
            "slots": 0,
            "answers": [],
        }
        for name in ways
    }
    for prompt in prompts:
        for name, row in rows.items():
            result = model.generate(prompt, **ways[name], **sampling)
            further = result.usage.completion_tokens - 1
            row["times"].append(((result.timing.tpot_s or 0.0) * further, further))
            row["answers"].append(result.token_ids)
            if result.speculation:
                row["rounds"] += result.speculation.rounds
                row["drafted"] += sum(stats.draft_length for stats in result.rounds)
                row["slots"] += sum(stats.num_slots for stats in result.rounds)
                row["undrafted"] += result.speculation.undrafted_rounds
                row["copied"] += result.speculation.lookup_rounds
                row["committed"] += result.speculation.acceptance_length * result.speculation.rounds
    report: dict[str, Any] = {"plain": {"ms_per_token": _ms_per_token(rows["plain"])}}
    for name, row in list(rows.items())[1:]:
        ratio = paired_ratio(row["times"], rows[options.over]["times"])
        verdicts = [
            label(
                compare(
                    model.engine,
                    prompt,
                    (one, other),
                    SamplingParams(**sampling),
                    eos_token_ids=model.target.eos_token_ids,
                    largest_rounding=tolerance(model.target.transformer.dtype),
                )
            ).split(" ")[0]
            for prompt, one, other in zip(
                prompts, rows["plain"]["answers"], row["answers"], strict=True
            )
        ]
        report[name] = {
            "ms_per_token": _ms_per_token(row),
            "ratio": round(ratio.value, 3),
            "interval": [round(ratio.low, 3), round(ratio.high, 3)],
            "acceptance_length": round(row["committed"] / row["rounds"], 3),
            "draft_length": round(row["drafted"] / row["rounds"], 3),
            "slots": round(row["slots"] / row["rounds"], 3),
            "undrafted_rounds": round(row["undrafted"] / row["rounds"], 3),
            "lookup_rounds": round(row["copied"] / row["rounds"], 3),
            "identical": {verdict: verdicts.count(verdict) for verdict in sorted(set(verdicts))},
        }
    report |= {
        "prompts": len(prompts),
        "settings": vars(options) | {"prompts_file": options.prompts_file.name},
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads, torch {torch.__version__}",
        "date": date.today().isoformat(),
    }
    print(json.dumps(report, indent=2))


def _way(mode: str, size_name: str, size: int, extras: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """A name, and what `generate` is told; an extra of 0 is left out of both."""
    told = {name: value for name, value in extras.items() if value}
    words = {"draft_confidence": "cut", "lookup": "lookup", "least_kept": "least"}
    name = " ".join(
        [f"{mode} {size}", *(f"{words[extra]} {value:g}" for extra, value in told.items())]
    )
    return {name: {"mode": mode, size_name: size, **told}}


def _ms_per_token(row: dict[str, Any]) -> float:
    seconds, tokens = map(sum, zip(*row["times"], strict=True))
    return round(1000 * seconds / tokens, 2)


if __name__ == "__main__":
    main()
