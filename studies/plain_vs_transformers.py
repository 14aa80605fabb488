"""Plain decoding against `transformers.generate`: same dequantised weights, dtype and prompt,
taking turns, batch 1, greedy.

usage: python studies/plain_vs_transformers.py [--dtype bfloat16] [--tokens 128] [--repeats 5]

Prints one JSON object with the milliseconds a token of both (median over repeats) and their ratio.
Run it on an idle machine."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable

import torch
from transformers import AutoModelForCausalLM

import d3d
from d3d.hub.open_model import DTYPES
from shared import make_parser, origin

PROMPT = "Explain in simple words why the sky is blue."


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--dtype", default="bfloat16", choices=sorted(DTYPES))
    parser.add_argument("--quantize", help="int8; d3d only, transformers keeps its weights")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()

    model = d3d.load(options.target, dtype=options.dtype, plain=True, quantize=options.quantize)
    dtype = DTYPES[options.dtype]
    reference = AutoModelForCausalLM.from_pretrained(model.target.path, dtype=dtype).eval()
    reference.to(model.target.device)
    prompt, tokens = model.encode(PROMPT), options.tokens
    ours, theirs = [], []
    for repeat in range(options.repeats + 1):
        own_s = timed(
            lambda: model.generate(prompt, mode="plain", max_tokens=tokens, ignore_eos=True)
        )
        their_s = timed(lambda: generate(reference, prompt, tokens))
        if repeat:  # the first warms up
            ours.append(1000 * own_s / tokens)
            theirs.append(1000 * their_s / tokens)
    ratios = [their / own for own, their in zip(ours, theirs, strict=True)]
    report = {
        "d3d_ms_per_token": round(statistics.median(ours), 2),
        "transformers_ms_per_token": round(statistics.median(theirs), 2),
        "ratio": round(statistics.median(ratios), 3),
        "ratios": [round(ratio, 3) for ratio in ratios],
        "device": model.device_name,
        **origin(options),
    }
    print(json.dumps(report, indent=2))


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


def timed(action: Callable[[], object]) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
