"""A program that is killed in the middle of async decoding: how long does its draft worker live?

As a script: the program itself. It prints the worker's process id and decodes until it is killed.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import psutil

from d3d.methods.async_.workers import ProcessWorker
from d3d.target.native import NativeTarget
from support.async_runs import async_drafter, coordinating, rehearsed
from support.runs import run
from support.tiny import tiny_transformer


def seconds_until_gone(limit_s: float = 30.0) -> float:
    """Kill such a program with signal 9 when it has decoded for a moment; how long its worker is
    there after that, at most `limit_s`."""
    paths = os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])
    program = subprocess.Popen(
        [sys.executable, __file__], stdout=subprocess.PIPE, env=os.environ | {"PYTHONPATH": paths}
    )
    try:
        assert program.stdout is not None
        worker = psutil.Process(int(program.stdout.readline()))
        time.sleep(0.5)
        program.kill()
        started = time.monotonic()
        while (
            worker.is_running()
            and worker.status() != psutil.STATUS_ZOMBIE
            and time.monotonic() - started < limit_s
        ):
            time.sleep(0.02)
        return time.monotonic() - started
    except psutil.NoSuchProcess:  # between two looks
        return time.monotonic() - started
    finally:
        program.kill()
        program.wait()


def _decode_forever() -> None:
    target = NativeTarget(tiny_transformer())
    make_double = partial(
        rehearsed, [run(target, max_tokens=100).token_ids], wrong=0.2, delay_s=0.01
    )
    with coordinating(make_double, launch=lambda: ProcessWorker(make_double, [])) as coordinator:
        worker = coordinator.link.worker
        assert isinstance(worker, ProcessWorker)
        print(worker.process.pid, flush=True)
        while True:
            run(target, async_drafter(coordinator), max_tokens=100)


if __name__ == "__main__":
    _decode_forever()
