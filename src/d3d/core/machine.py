"""Which machine, and which versions, a measurement comes from."""

from __future__ import annotations

import os
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil
import torch

LOOK_S = 0.5
"""How long the machine is watched for other work, in which this process sleeps."""


def machine() -> dict[str, Any]:
    """This machine, as far as it decides about speed; load_at_start: other work, in cores."""
    return {
        "platform": platform.platform(),
        "processor": processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_bytes": psutil.virtual_memory().total,
        "gpus": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
        "load_at_start": round(psutil.cpu_percent(interval=LOOK_S) / 100 * (os.cpu_count() or 1), 2),
    }


def processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.processor())


def versions() -> dict[str, str]:
    return {
        "d3d": version("d3d-decoding"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": version("transformers"),
    }
