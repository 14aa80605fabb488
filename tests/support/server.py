"""`d3d serve` as a real process on a free port of the loopback address."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import psutil


class RunningServer(NamedTuple):
    url: str
    process: subprocess.Popen[str]
    log: Path

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(30)

    @property
    def memory_bytes(self) -> int:
        return int(psutil.Process(self.process.pid).memory_info().rss)


@contextmanager
def serving(log: Path, *arguments: object) -> Iterator[RunningServer]:
    """Start a server and wait until it listens."""
    command = [sys.executable, "-m", "d3d.cli.app", "serve", "--port", "0", *map(str, arguments)]
    paths = os.pathsep.join(path for path in sys.path if path)
    environment = os.environ | {"PYTHONPATH": paths, "NO_COLOR": "1", "COLUMNS": "500"}
    with log.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, text=True, env=environment)
    try:
        while (found := re.search(r"at (http://\S+)/v1", log.read_text())) is None:
            try:
                process.wait(0.05)
            except subprocess.TimeoutExpired:
                continue
            raise AssertionError(log.read_text())
        yield RunningServer(found[1], process, log)
    finally:
        process.kill()
        process.wait()
