"""Milliseconds of a pass in C and of torch's, by rows, over one cached context; taking turns.

usage: python studies/native_passes.py [--target smollm2-135m] [--gguf FILE] [--rows 1 2 4 6 8 ...]

The C library runs the GGUF file as it is stored; torch runs its conversion in --dtype with packed
weights. Prints one JSON object: minimum and median wall-clock milliseconds of each, all logits
computed, and the CPU's milliseconds (all threads) of the C pass. Run it on an idle machine."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from d3d.hub.cache import cache_root
from d3d.hub.open_model import DTYPES, open_model
from d3d.machine import processor
from d3d.model.linear import pack_weights
from d3d.native.native_pass import NativePass, default_threads
from d3d.target.native import NativeTarget
from shared import make_parser, origin

FILE = "models/SmolLM2-135M-Instruct.Q4_1.gguf"


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--gguf", type=Path, default=cache_root() / FILE)
    parser.add_argument("--dtype", default="bfloat16", choices=sorted(DTYPES))
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 6, 8, 12, 16, 24, 32])
    parser.add_argument("--context", type=int, default=256, help="cached tokens")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--threads", type=int, default=default_threads())
    options = parser.parse_args()

    torch.set_num_threads(options.threads)
    model = open_model(options.target, device="cpu", dtype=options.dtype)
    pack_weights(model.transformer)
    theirs = NativeTarget(model.transformer)
    ours = NativePass.from_gguf(options.gguf, model.config, threads=options.threads)
    context = torch.randint(model.vocab_size, (options.context,)).tolist()
    ours.open(0, options.context + max(options.rows))
    ours.forward([0], [context], wanted=[])
    theirs.forward([0], [context], last_only=True)

    def pass_in_c(tokens: list[int]) -> None:
        ours.forward([0], [tokens])
        ours.crop(0, options.context)

    def pass_of_torch(tokens: list[int]) -> None:
        theirs.forward([0], [tokens])
        theirs.cache.crop(0, options.context)

    table = []
    for rows in options.rows:
        runs: dict[str, list[float]] = {"c": [], "torch": []}
        busy = []
        for _ in range(options.repeats):
            for name, run in (("c", pass_in_c), ("torch", pass_of_torch)):
                run(context[:rows])  # warms caches and wakes its threads
                before = time.process_time()
                runs[name].append(milliseconds(run, context[:rows]))
                if name == "c":
                    busy.append(1000 * (time.process_time() - before))
        entry = {"rows": rows, "c_processor_ms": round(min(busy), 2)}
        for name, times in runs.items():
            entry[f"{name}_min_ms"] = round(min(times), 2)
            entry[f"{name}_median_ms"] = round(statistics.median(times), 2)
        table.append(entry)
    print(
        json.dumps(
            {"processor": processor(), "level": ours.level, "passes": table} | origin(options),
            indent=2,
        )
    )


def milliseconds(run: Callable[[list[int]], None], tokens: list[int]) -> float:
    start = time.perf_counter()
    run(tokens)
    return 1000 * (time.perf_counter() - start)


if __name__ == "__main__":
    main()
