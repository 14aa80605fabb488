"""Thousands of rounds of async mode with faults injected, on tiny models: every answer must be the
target's own.

usage: python tests/soak.py [--rounds 20000] [--placements thread] [--state FILE]      (or: make
soak ARGS="--rounds 50000")

Prints one JSON object: rounds, faults by kind, fallbacks by cause, memory at start and end,
seconds, and what should not have been; the exit status is 1 where there was any. Ctrl-C ends it
with the figures so far; with --state it goes on there the next time."""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import signal
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import torch

from support.orphans import seconds_until_gone
from support.soak import Tally, play, scenario, soak

REPEATED = [number for number in range(218) if scenario(number).placement == "thread"][::9]
"""Scenarios that are played over and over in the end: what is kept for every new shape has been
kept by then, so memory must be flat."""
LAPS = 4
GROWTH_MIB = 24.0
"""Allowed from the first of these laps to the last: fragments."""
ORPHANED_S = 5.0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=20_000)
    parser.add_argument(
        "--placements", nargs="+", choices=["thread", "processes"], default=["thread", "processes"]
    )
    parser.add_argument(
        "--state", type=Path, help="where the figures so far are kept, to go on from"
    )
    parser.add_argument(
        "--parents-killed", type=int, default=3, help="how many programs to kill in the end"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    for name in (
        signal.SIGINT,
        signal.SIGTERM,
    ):  # in the background, too, where a shell has SIGINT ignored
        signal.signal(name, signal.default_int_handler)
    tally, number, seconds = _read(options.state)
    started, memory = time.monotonic() - seconds, [_memory(tally)]

    def after_each(following: int) -> None:
        nonlocal number
        number = following
        if tally.scenarios % 12 == 0:
            memory.append(_memory(tally))
            print(
                f"{tally.all_rounds} rounds, {tally.faults.total()} faults, {memory[-1]}",
                file=sys.stderr,
                flush=True,
            )
        if options.state is not None:
            _write(options.state, tally, number, time.monotonic() - started)

    interrupted, laps = False, list[dict[str, Any]]()
    try:
        soak(options.rounds, options.placements, tally, number, after_each)
        memory.append(_memory(tally))
        laps = _laps(tally)
        orphaned = [round(seconds_until_gone(), 2) for _ in range(options.parents_killed)]
    except KeyboardInterrupt:
        interrupted, orphaned = True, []
    tally.faults["parent killed"] += len(orphaned)
    _look_at(tally, laps, orphaned)
    report = {
        "all_rounds": tally.all_rounds,
        **_plain(tally),
        "workers_gone_after_s": orphaned,
        "memory": [memory[0], memory[-1], *laps],
    }
    report |= {"seconds": round(time.monotonic() - started, 1), "interrupted": interrupted}
    print(json.dumps(report, indent=2))
    return 1 if tally.failures else 0


def _laps(tally: Tally) -> list[dict[str, Any]]:
    """The memory after each lap of REPEATED."""
    memory = []
    for _ in range(LAPS):
        for number in REPEATED:
            play(scenario(number), tally)
        memory.append(_memory(tally))
        print(f"again: {tally.all_rounds} rounds, {memory[-1]}", file=sys.stderr, flush=True)
    return memory


def _look_at(tally: Tally, laps: list[dict[str, Any]], orphaned: list[float]) -> None:
    """Complain about what grows, and about workers without a parent."""
    tally.failures += [
        f"a worker outlived its parent by {seconds} s"
        for seconds in orphaned
        if seconds > ORPHANED_S
    ]
    if len(laps) < 2:
        return
    first, last = laps[0], laps[-1]
    if last["rss_mib"] - first["rss_mib"] > GROWTH_MIB:
        tally.failures.append(f"memory grew from {first['rss_mib']} to {last['rss_mib']} MiB")
    tally.failures += [
        f"{what} grew: {first[what]} to {last[what]}"
        for what in ("files", "children")
        if last[what] > first[what]
    ]


def _memory(tally: Tally) -> dict[str, Any]:
    gc.collect()
    if sys.platform == "linux" and hasattr(library := ctypes.CDLL(None), "malloc_trim"):
        library.malloc_trim(0)  # what the allocator keeps for later is not in use
    process = psutil.Process()
    return {
        "scenarios": tally.scenarios,
        "rss_mib": round(process.memory_info().rss / 2**20, 1),
        "files": process.num_fds() if os.name == "posix" else 0,
        "threads": threading.active_count(),
        "children": len(process.children(recursive=True)),
    }


def _plain(tally: Tally) -> dict[str, Any]:
    return {
        key: dict(value.most_common()) if isinstance(value, Counter) else value
        for key, value in vars(tally).items()
    }


def _read(path: Path | None) -> tuple[Tally, int, float]:
    """The tally, the next scenario's number and the seconds so far."""
    if path is None or not path.exists():
        return Tally(), 0, 0.0
    stored = json.loads(path.read_text())
    tally = Tally(
        **{
            key: Counter(value) if isinstance(value, dict) else value
            for key, value in stored["tally"].items()
        }
    )
    return tally, stored["next"], stored["seconds"]


def _write(path: Path, tally: Tally, number: int, seconds: float) -> None:
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps({"tally": _plain(tally), "next": number, "seconds": seconds}))
    part.replace(path)


if __name__ == "__main__":
    sys.exit(main())
