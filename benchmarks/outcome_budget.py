"""Which outcome budget takes least time a token: hit rates of recorded rounds, with times of passes
measured here.

usage: python benchmarks/outcome_budget.py smollm2-135m HIT_RATES.json [--guess-from block] [--dtype
bfloat16] [--context 200]

HIT_RATES.json is what `d3d evaluate DRAFTER CORPUS --mode async` printed. Times are measured here,
one thing at a time: a verification of draft_length + 1 rows, a draft pass, and for each budget a
packed pass with what listing its outcomes costs. With target and drafter on devices of their own,
each as fast as this one and nothing shared, a round takes

    max(t_verify, t_packed) + (1 - hit_rate) * t_draft

since a miss waits for a draft (`draft_now`), and a token takes that / acceptance length. Prints one
JSON object. Run it on an idle machine."""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

import torch

import d3d
from d3d.methods.async_.packed_pass import GUESS_FROM, PackedDrafter


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("target")
    parser.add_argument("hit_rates", type=Path)
    parser.add_argument("--drafter")
    parser.add_argument(
        "--guess-from", choices=GUESS_FROM, help="as in the hit rates, unless it is given"
    )
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--context", type=int, default=200, help="committed tokens")
    parser.add_argument("--repeats", type=int, default=20)
    options = parser.parse_args()

    record = json.loads(options.hit_rates.read_text(encoding="utf-8").splitlines()[-1])
    length, budgets = record["draft_length"], [int(budget) for budget in record["hit_rate"]]
    model = d3d.load(options.target, options.drafter, dtype=options.dtype, device=options.device)
    assert model.drafter is not None, "a target with a drafter is needed"
    guess_from = options.guess_from or record["guess_from"]
    measured = Times(
        model,
        PackedDrafter(model.drafter.model, model.target.config.vocab_size, guess_from),
        options.context,
        length,
    )
    t_verify, t_draft = (
        measured.verify(options.repeats),
        measured.draft(max(budgets), options.repeats),
    )
    rows = {}
    for budget in budgets:
        t_packed, hit_rate = (
            measured.packed(budget, options.repeats),
            record["hit_rate"][str(budget)],
        )
        t_round = max(t_verify, t_packed) + (1 - hit_rate) * t_draft
        rows[str(budget)] = {
            "packed_ms": round(1000 * t_packed, 2),
            "hit_rate": round(hit_rate, 4),
            "modelled_ms_per_token": round(1000 * t_round / record["acceptance_length"], 2),
        }
    report: dict[str, Any] = {
        "budgets": rows,
        "best_budget": min(budgets, key=lambda budget: rows[str(budget)]["modelled_ms_per_token"]),
        "verify_ms": round(1000 * t_verify, 2),
        "draft_ms": round(1000 * t_draft, 2),
        "serial_modelled_ms_per_token": round(
            1000 * (t_verify + t_draft) / record["acceptance_length"], 2
        ),
        "acceptance_length": record["acceptance_length"],
        "guess_from": guess_from,
        "settings": {
            "target": options.target,
            "dtype": options.dtype,
            "context": options.context,
            "draft_length": length,
        },
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads, torch {torch.__version__}",
        "device": str(model.target.transformer.device),
        "date": date.today().isoformat(),
    }
    print(json.dumps(report, indent=2))


class Times:
    """Passes behind one text, as often as they are asked for. Seconds, medians."""

    def __init__(
        self, model: d3d.Model, preparer: PackedDrafter, context: int, draft_length: int
    ) -> None:
        self._model, self._preparer, self._length = model, preparer, draft_length
        words = model.tokenizer.encode(
            "One two three four five six seven eight nine ten. ", add_special_tokens=False
        )
        self._text = (words * (context // len(words) + 1))[:context]

    def verify(self, repeats: int) -> float:
        session = self._model.engine.open(1, len(self._text) + self._length + 1)
        session.forward([self._text[:-1]], last_only=True)

        def once() -> None:
            session.forward([[self._text[-1], *self._text[: self._length]]])
            session.crop([len(self._text) - 1])

        return self._median(once, repeats)

    def draft(self, budget: int, repeats: int) -> float:
        session = self._preparer.open(len(self._text) + self._length, budget)
        return self._median(lambda: session.draft(self._text, self._length), repeats)

    def packed(self, budget: int, repeats: int) -> float:
        session = self._preparer.open(len(self._text) + self._length, budget)
        seconds = []
        for _ in range(repeats + 2):
            draft = session.draft(
                self._text, self._length
            ).token_ids  # outcomes are listed from the draft's own pass
            begun = self._now()
            outcomes = session.likely_outcomes(self._text, draft, budget)
            session.prepare(self._text, draft, outcomes, self._length)
            seconds.append(self._now() - begun)
        return median(seconds[2:])

    def _median(self, once: Callable[[], object], repeats: int) -> float:
        seconds = []
        for _ in range(repeats + 2):
            begun = self._now()
            once()
            seconds.append(self._now() - begun)
        return median(seconds[2:])

    def _now(self) -> float:
        if self._model.target.transformer.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()


if __name__ == "__main__":
    main()
