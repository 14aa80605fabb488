"""What auto mode costs when drafting can't pay: a drafter of random weights, paired with plain
decoding, prompt by prompt.

usage: python studies/hopeless.py PROMPTS.jsonl [--prompts 8] [--max-tokens 128] [--dtype bfloat16]

Prints one JSON object: seconds of an answer in auto mode over those in plain, first token included,
as the median over prompts and for each of them; `first` for a model that has answered nothing yet,
`later` for one that has. End tokens are ignored. Run it on an idle machine."""

from __future__ import annotations

import json
import statistics
from typing import Any

import torch

from d3d.api import Model
from d3d.hub.open_model import open_model
from d3d.methods.base import Parts
from d3d.model.drafter import DrafterConfig
from d3d.model.from_target import from_target
from d3d.model.linear import pack_weights
from d3d.results import GenerationResult
from d3d.target.native import NativeTarget
from shared import add_model_options, add_prompt_options, make_parser, origin, prompts_of


def main() -> None:
    parser = make_parser(__doc__)
    add_prompt_options(parser, prompts=8, max_tokens=128)
    add_model_options(parser, drafter=False)
    options = parser.parse_args()
    model = hopeless(options.target, options.dtype, options.device)
    prompts = prompts_of(options, model)
    sampling: dict[str, Any] = {"max_tokens": options.max_tokens, "ignore_eos": True}
    for mode in ("plain", "serial"):  # warm-up, not measured
        model.generate(prompts[0], mode=mode, **sampling | {"max_tokens": 16})
    rows = []
    for prompt in prompts:
        plain = model.generate(prompt, mode="plain", **sampling)
        first = Model(model.parts).generate(prompt, mode="auto", **sampling)
        again = model.generate(prompt, mode="plain", **sampling)
        later = model.generate(prompt, mode="auto", **sampling)
        choice = first.speculation.choice if first.speculation else None
        ratios = {
            "first": seconds(first) / seconds(plain),
            "later": seconds(later) / seconds(again),
        }
        rows.append(ratios if choice is None else ratios | {"rounds": choice.rounds})
    medians = {name: statistics.median(row[name] for row in rows) for name in ("first", "later")}
    report = {
        **{name: round(value, 3) for name, value in medians.items()},
        "plain_ms_per_token": round(1000 * (plain.timing.tpot_s or 0.0), 2),
        "each": rows,
        "why": None if choice is None else choice.why,
        **origin(options),
    }
    print(json.dumps(report, indent=2))


def hopeless(target: str, dtype: str, device: str) -> Model:
    """A target with a drafter as large as itself whose weights are random: no drafted token is ever
    kept."""
    base = open_model(target, dtype=dtype, device=device)
    drafter = from_target(
        base.transformer, DrafterConfig(kept_layers=tuple(range(base.config.num_layers)))
    )
    generator = torch.Generator().manual_seed(0)
    for parameter in drafter.transformer.parameters():
        parameter.requires_grad_(False)
        if parameter.dim() > 1:
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.05)
    drafter.eval()
    pack_weights(base.transformer, drafter)
    return Model(Parts(base, NativeTarget(base.transformer), drafter))


def seconds(result: GenerationResult) -> float:
    return result.usage.completion_tokens / result.timing.tokens_per_s


if __name__ == "__main__":
    main()
