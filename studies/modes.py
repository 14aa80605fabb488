"""Plain, serial and fused decoding: same engine, weights, dtype and prompts, taking turns prompt by
prompt.

usage: python studies/modes.py PROMPTS.jsonl [--prompts 20] [--max-tokens 192] [--dtype bfloat16]
           [--draft-lengths 2 4 6] [--draft-confidences 0 0.1] [--lookups 0 2] [--least-kept 0 0.8]
           [--rows 6 12] [--over "serial 4 lookup 2"]

Prints one JSON object: milliseconds a token of plain, of serial at each draft length with each cut,
lookup and pause, of fused at each budget of rows with each lookup (0: none); how many times as fast
each is as plain, or as the way named by --over, with its 95 % interval over the prompts; acceptance
length, tokens and slots of a verification, and how many answers are identical. Ratios are of totals
over all prompts. Run it on an idle machine."""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import d3d
from d3d.engine import metrics
from d3d.engine.params import SamplingParams
from d3d.engine.round import Round
from d3d.lab.bench.lossless import compare, label, tolerance
from d3d.lab.stats import paired_ratio
from shared import add_model_options, add_prompt_options, make_parser, origin, prompts_of

Ways = dict[str, dict[str, Any]]
"""Options of `generate`, by a way's name."""


@dataclass
class Answers:
    """The answers of one way."""

    times: list[tuple[float, float]] = field(default_factory=list)
    """Seconds and tokens after the first token."""
    rounds: list[Round] = field(default_factory=list)
    token_ids: list[tuple[int, ...]] = field(default_factory=list)

    @property
    def ms_per_token(self) -> float:
        seconds, tokens = map(sum, zip(*self.times, strict=True))
        return round(1000 * seconds / tokens, 2)

    def per_round(self, count: int) -> float:
        return round(metrics.ratio(count, len(self.rounds)), 3)


def main() -> None:
    parser = arguments()
    options = parser.parse_args()
    ways = ways_of(options)
    if options.over not in ways:
        parser.error(f"--over {options.over!r} is not one of {', '.join(ways)}")
    model = d3d.load(
        options.target,
        options.drafter,
        dtype=options.dtype,
        device=options.device,
        quantize=options.quantize,
    )
    prompts = prompts_of(options, model)
    sampling = {name: getattr(options, name) for name in ("max_tokens", "temperature", "seed")}
    for way in ways.values():  # warm-up, not measured
        model.generate(prompts[0], **way, **sampling | {"max_tokens": 16})
    rows = {name: Answers() for name in ways}
    for prompt in prompts:
        for name, row in rows.items():
            result = model.generate(prompt, **ways[name], **sampling)
            further = result.usage.completion_tokens - 1
            row.times.append(((result.timing.tpot_s or 0.0) * further, further))
            row.token_ids.append(result.token_ids)
            row.rounds += result.rounds if result.speculation else ()
    report: dict[str, Any] = {"plain": {"ms_per_token": rows["plain"].ms_per_token}}
    for name in list(rows)[1:]:
        pairs = zip(prompts, rows["plain"].token_ids, rows[name].token_ids, strict=True)
        verdicts = [verdict(model, *pair, SamplingParams(**sampling)) for pair in pairs]
        report[name] = figures(rows[name], rows[options.over], verdicts)
    print(json.dumps(report | {"prompts": len(prompts)} | origin(options), indent=2))


def arguments() -> argparse.ArgumentParser:
    parser = make_parser(__doc__)
    add_prompt_options(parser, prompts=20, max_tokens=192)
    add_model_options(parser)
    parser.add_argument("--quantize", help="int8")
    lists = (
        ("--draft-lengths", int, [2, 3, 4, 6, 8], "of serial mode"),
        ("--draft-confidences", float, [0], "of serial mode"),
        ("--lookups", int, [0], "of serial and fused mode"),
        ("--least-kept", float, [0], "of serial mode"),
        ("--rows", int, [6, 9, 12, 16], "of fused mode"),
    )
    for name, kind, default, about in lists:
        parser.add_argument(name, type=kind, nargs="*", default=default, help=about)
    parser.add_argument("--over", default="plain", help="the way that ratios are taken to")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    return parser


def ways_of(options: argparse.Namespace) -> Ways:
    ways: Ways = {"plain": {"mode": "plain"}}
    extras = ("draft_confidence", "lookup", "least_kept")
    for length, *values in product(
        options.draft_lengths, options.draft_confidences, options.lookups, options.least_kept
    ):
        ways |= _way("serial", "draft_length", length, dict(zip(extras, values, strict=True)))
    for rows, lookup in product(options.rows, options.lookups):
        ways |= _way("fused", "rows", rows, {"lookup": lookup})
    return ways


def _way(mode: str, size_name: str, size: int, extras: dict[str, Any]) -> Ways:
    """An extra of 0 is left out of the name and of the options."""
    given = {name: value for name, value in extras.items() if value}
    words = {"draft_confidence": "cut", "lookup": "lookup", "least_kept": "least"}
    parts = [f"{mode} {size}", *(f"{words[name]} {value:g}" for name, value in given.items())]
    return {" ".join(parts): {"mode": mode, size_name: size, **given}}


def verdict(
    model: d3d.Model,
    prompt: list[int],
    plain: tuple[int, ...],
    answer: tuple[int, ...],
    sampling: SamplingParams,
) -> str:
    """One word: whether an answer has plain decoding's ids."""
    divergence = compare(
        model.parts.target,
        prompt,
        (plain, answer),
        sampling,
        eos_token_ids=model.target.eos_token_ids,
        largest_rounding=tolerance(model.target.dtype),
    )
    return label(divergence).split(" ")[0]


def figures(row: Answers, over: Answers, verdicts: list[str]) -> dict[str, Any]:
    ratio = paired_ratio(row.times, over.times)
    rounds = row.rounds
    return {
        "ms_per_token": row.ms_per_token,
        "ratio": round(ratio.value, 3),
        "interval": [round(ratio.low, 3), round(ratio.high, 3)],
        "acceptance_length": round(metrics.acceptance_length(rounds), 3),
        "draft_length": row.per_round(sum(round_.draft_length for round_ in rounds)),
        "slots": row.per_round(sum(round_.num_slots or 0 for round_ in rounds)),
        "undrafted_rounds": row.per_round(sum(not round_.draft_length for round_ in rounds)),
        "lookup_rounds": row.per_round(sum(round_.looked_up for round_ in rounds)),
        "identical": {each: verdicts.count(each) for each in sorted(set(verdicts))},
    }


if __name__ == "__main__":
    main()
