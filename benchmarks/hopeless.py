"""What auto mode costs where drafting can't pay: a drafter of random weights, paired with plain
decoding, prompt by prompt.

usage: python benchmarks/hopeless.py PROMPTS.jsonl [--prompts 8] [--max-tokens 128] [--dtype
bfloat16]

Prints one JSON object: seconds of an answer in auto mode over those in plain, first token included,
as the median over prompts and each of them; `first` for a model that has answered nothing yet,
`later` for one that has. Answers are not cut short by an end token. Run it on an idle machine."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import torch

from d3d.api import Model
from d3d.results import GenerationResult
from d3d.methods.serial.drafter import BlockDrafter
from d3d.hub.open_model import open_model
from d3d.model.drafter import DrafterConfig
from d3d.model.from_target import from_target
from d3d.model.linear import pack_weights
from d3d.target.native import NativeEngine
from d3d.train.prompts import read_prompts


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("prompts_file", type=Path)
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="auto")
    options = parser.parse_args()

    model = hopeless(options.target, options.dtype, options.device)
    prompts = [
        prompt.token_ids
        for prompt in read_prompts(options.prompts_file, model.tokenizer)[: options.prompts]
    ]
    asked: dict[str, Any] = {"max_tokens": options.max_tokens, "ignore_eos": True}
    for mode in ("plain", "serial"):  # warm-up, not measured
        model.generate(prompts[0], mode=mode, **asked | {"max_tokens": 16})
    rows = []
    for prompt in prompts:
        plain = model.generate(prompt, mode="plain", **asked)
        first = replace(model, _times={}).generate(prompt, mode="auto", **asked)
        again = model.generate(prompt, mode="plain", **asked)
        later = model.generate(prompt, mode="auto", **asked)
        rows.append(
            {
                "first": seconds(first) / seconds(plain),
                "later": seconds(later) / seconds(again),
                **rounds(first),
            }
        )
    report = {
        **{
            name: round(statistics.median(row[name] for row in rows), 3)
            for name in ("first", "later")
        },
        "plain_ms_per_token": round(1000 * (plain.timing.tpot_s or 0.0), 2),
        "each": rows,
        "why": first.speculation.choice.why
        if first.speculation and first.speculation.choice
        else None,
        "settings": vars(options) | {"prompts_file": options.prompts_file.name},
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads, torch {torch.__version__}",
        "date": date.today().isoformat(),
    }
    print(json.dumps(report, indent=2))


def hopeless(target: str, dtype: str, device: str) -> Model:
    """A target with a drafter as large as itself, whose weights are random: no drafted token is
    ever kept."""
    base = open_model(target, dtype=dtype, device=device)
    drafter = from_target(
        base.transformer, DrafterConfig(kept_layers=tuple(range(base.config.num_layers)))
    )
    generator = torch.Generator().manual_seed(0)
    for parameter in drafter.transformer.parameters():
        parameter.requires_grad_(False)
        if parameter.dim() > 1:
            noise = torch.randn(parameter.shape, generator=generator) * 0.05
            parameter.copy_(noise)
    drafter.eval()
    pack_weights(base.transformer, drafter)
    engine = NativeEngine(base.transformer)
    return Model(base, engine, BlockDrafter(drafter, engine.vocab_size))


def seconds(result: GenerationResult) -> float:
    return result.usage.completion_tokens / result.timing.tokens_per_s


def rounds(result: GenerationResult) -> dict[str, Any]:
    choice = result.speculation.choice if result.speculation else None
    return {} if choice is None else {"rounds": choice.rounds}


if __name__ == "__main__":
    main()
