"""Plain and serial decoding over draft lengths: same engine, weights, dtype and prompts, alternating prompt by prompt.

usage: python benchmarks/draft_length.py PROMPTS.jsonl [--prompts 20] [--max-tokens 192] [--dtype bfloat16] [--draft-lengths 2 4 6 8]

Prints one JSON object: milliseconds a token of each mode, the ratio to plain, acceptance length, and how many answers are identical.
Ratios are of totals over all prompts. Run it on an idle machine.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
from datetime import date
from pathlib import Path

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
    parser.add_argument("--draft-lengths", type=int, nargs="+", default=[1, 2, 3, 4, 6, 8])
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()

    model = d3d.load(options.target, options.drafter, dtype=options.dtype, device=options.device)
    prompts = [prompt.token_ids for prompt in read_prompts(options.prompts_file, model.tokenizer)[: options.prompts]]
    sampling = {"max_tokens": options.max_tokens, "temperature": options.temperature, "seed": options.seed}
    for length in [0, *options.draft_lengths]:  # warm-up, not measured
        run(model, prompts[0], length, sampling | {"max_tokens": 16})
    rows = {length: {"seconds": 0.0, "tokens": 0, "rounds": 0, "committed": 0.0, "answers": []} for length in [0, *options.draft_lengths]}
    for prompt in prompts:
        for length, row in rows.items():
            result = run(model, prompt, length, sampling)
            further = result.usage.completion_tokens - 1
            row["seconds"] += (result.timing.tpot_s or 0.0) * further
            row["tokens"] += further
            row["answers"].append(result.token_ids)
            if result.speculation:
                row["rounds"] += result.speculation.rounds
                row["committed"] += result.speculation.acceptance_length * result.speculation.rounds
    plain_ms = 1000 * rows[0]["seconds"] / rows[0]["tokens"]
    report = {"plain_ms_per_token": round(plain_ms, 2), "serial": {}}
    for length in options.draft_lengths:
        row = rows[length]
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
            for prompt, one, other in zip(prompts, rows[0]["answers"], row["answers"], strict=True)
        ]
        report["serial"][length] = {
            "ms_per_token": round(ms, 2),
            "ratio": round(plain_ms / ms, 3),
            "acceptance_length": round(row["committed"] / row["rounds"], 3),
            "identical": {verdict: verdicts.count(verdict) for verdict in sorted(set(verdicts))},
        }
    report |= {
        "prompts": len(prompts),
        "settings": vars(options) | {"prompts_file": options.prompts_file.name},
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads, torch {torch.__version__}",
        "date": date.today().isoformat(),
    }
    print(json.dumps(report, indent=2))


def run(model: d3d.Model, prompt: list[int], draft_length: int, sampling: dict) -> d3d.GenerationResult:
    """Draft length 0 is plain mode."""
    if draft_length == 0:
        return model.generate(prompt, mode="plain", **sampling)
    return model.generate(prompt, mode="serial", draft_length=draft_length, **sampling)


if __name__ == "__main__":
    main()
