"""Plain decoding here against `transformers.generate`: same dequantised weights, dtype and prompts,
alternating, batch 1, greedy.

usage: python benchmarks/plain_vs_transformers.py [--dtype bfloat16] [--tokens 128] [--repeats 5]

Prints one JSON object with the milliseconds a token of both (median over repeats) and their ratio.
Run it on an idle machine."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from datetime import date

import torch
from transformers import AutoModelForCausalLM

import d3d
from d3d.hub.open_model import DTYPES

PROMPT = "Explain in simple words why the sky is blue."


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--dtype", default="bfloat16", choices=sorted(DTYPES))
    parser.add_argument(
        "--quantize", help="int8: here only; transformers keeps its dtype's weights"
    )
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()

    model = d3d.load(options.target, dtype=options.dtype, plain=True, quantize=options.quantize)
    reference = AutoModelForCausalLM.from_pretrained(
        model.target.path, dtype=DTYPES[options.dtype]
    ).eval()
    reference.to(model.target.transformer.device)
    prompt = model.encode(PROMPT)
    ours, theirs = [], []
    for repeat in range(options.repeats + 1):
        one = timed(
            lambda: model.generate(prompt, mode="plain", max_tokens=options.tokens, ignore_eos=True)
        )
        two = timed(lambda: generate(reference, prompt, options.tokens))
        if repeat:  # the first warms up
            ours.append(1000 * one / options.tokens)
            theirs.append(1000 * two / options.tokens)
    ratios = [b / a for a, b in zip(ours, theirs, strict=True)]
    print(
        json.dumps(
            {
                "d3d_ms_per_token": round(statistics.median(ours), 2),
                "transformers_ms_per_token": round(statistics.median(theirs), 2),
                "ratio": round(statistics.median(ratios), 3),
                "ratios": [round(ratio, 3) for ratio in ratios],
                "settings": vars(options) | {"device": model.device_name},
                "machine": f"{os.cpu_count()} cores, {torch.get_num_threads()} threads, torch {torch.__version__}",
                "date": date.today().isoformat(),
            },
            indent=2,
        )
    )


@torch.inference_mode()
def generate(reference: torch.nn.Module, prompt: list[int], tokens: int) -> None:
    ids = torch.tensor([prompt], device=reference.device)
    reference.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=tokens,
        min_new_tokens=tokens,
        do_sample=False,
    )


def timed(action) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
