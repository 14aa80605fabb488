"""Plain, serial and fused decoding: same engine, weights, dtype and prompts, alternating prompt by prompt.

usage: python benchmarks/modes.py PROMPTS.jsonl [--prompts 20] [--max-tokens 192] [--dtype bfloat16] [--draft-lengths 2 4 6]
       [--draft-confidences 0.1] [--lookups 2] [--least-kept 0.8] [--rows 6 12]

Prints one JSON object: milliseconds a token of plain, of serial at each draft length, of serial at the longest of them cut at each
confidence, of fused at each budget of rows, of both with copies, and of serial with pauses besides; ratios to plain, acceptance length,
tokens verified a round, and how many answers are identical. Ratios are of totals over all prompts. Run it on an idle machine.
"""

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
from d3d.benchmarks.lossless import compare, label, tolerance
from d3d.core.types import SamplingParams
from d3d.training.prompts import read_prompts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompts_file", type=Path)
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--drafter")
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--max-tokens", type=int, default=192)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--quantize", help="int8")
    parser.add_argument("--draft-lengths", type=int, nargs="*", default=[2, 3, 4, 6, 8], help="of serial mode")
    parser.add_argument(
        "--draft-confidences", type=float, nargs="*", default=[], help="of serial mode, at the longest of the draft lengths"
    )
    parser.add_argument(
        "--lookups", type=int, nargs="*", default=[], help="of serial mode at every draft length, of fused mode with all rows"
    )
    parser.add_argument("--least-kept", type=float, nargs="*", default=[], help="of serial mode, each with each of the lookups")
    parser.add_argument("--rows", type=int, nargs="*", default=[6, 9, 12, 16], help="of fused mode")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()

    model = d3d.load(options.target, options.drafter, dtype=options.dtype, device=options.device, quantize=options.quantize)
    prompts = [prompt.token_ids for prompt in read_prompts(options.prompts_file, model.tokenizer)[: options.prompts]]
    sampling = {"max_tokens": options.max_tokens, "temperature": options.temperature, "seed": options.seed}
    ways: dict[str, dict[str, Any]] = {"plain": {"mode": "plain"}}
    ways |= {f"serial {length}": {"mode": "serial", "draft_length": length} for length in options.draft_lengths}
    longest = max(options.draft_lengths, default=None)
    ways |= {
        f"serial {longest} cut {least:g}": {"mode": "serial", "draft_length": longest, "draft_confidence": least}
        for least in options.draft_confidences
    }
    for length, lookup in product(options.draft_lengths, options.lookups or [0] * bool(options.least_kept)):
        way = {"mode": "serial", "draft_length": length, "lookup": lookup}
        ways |= {f"serial {length} lookup {lookup}": way}
        ways |= {f"serial {length} lookup {lookup} least {least:g}": way | {"least_kept": least} for least in options.least_kept}
    ways |= {f"fused {rows}": {"mode": "fused", "rows": rows} for rows in options.rows}
    ways |= {
        f"fused {rows} lookup {lookup}": {"mode": "fused", "rows": rows, "lookup": lookup}
        for rows, lookup in product(options.rows, options.lookups)
    }
    for way in ways.values():  # warm-up, not measured
        model.generate(prompts[0], **way, **sampling | {"max_tokens": 16})
    rows = {
        name: {"seconds": 0.0, "tokens": 0, "rounds": 0, "committed": 0.0, "undrafted": 0, "copied": 0, "drafted": 0, "answers": []}
        for name in ways
    }
    for prompt in prompts:
        for name, row in rows.items():
            result = model.generate(prompt, **ways[name], **sampling)
            further = result.usage.completion_tokens - 1
            row["seconds"] += (result.timing.tpot_s or 0.0) * further
            row["tokens"] += further
            row["answers"].append(result.token_ids)
            if result.speculation:
                row["rounds"] += result.speculation.rounds
                row["drafted"] += sum(stats.draft_length for stats in result.rounds)
                row["undrafted"] += result.speculation.undrafted_rounds
                row["copied"] += result.speculation.lookup_rounds
                row["committed"] += result.speculation.acceptance_length * result.speculation.rounds
    plain_ms = 1000 * rows["plain"]["seconds"] / rows["plain"]["tokens"]
    report: dict[str, Any] = {"plain": {"ms_per_token": round(plain_ms, 2)}}
    for name, row in list(rows.items())[1:]:
        ms = 1000 * row["seconds"] / row["tokens"]
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
            for prompt, one, other in zip(prompts, rows["plain"]["answers"], row["answers"], strict=True)
        ]
        report[name] = {
            "ms_per_token": round(ms, 2),
            "ratio": round(plain_ms / ms, 3),
            "acceptance_length": round(row["committed"] / row["rounds"], 3),
            "draft_length": round(row["drafted"] / row["rounds"], 3),
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


if __name__ == "__main__":
    main()
