"""Other programs to compare with, each through its public interface."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from d3d.errors import MissingExtra

INSTALL = "pip install 'd3d-decoding[bench]'"


def needed(module: str, purpose: str) -> Any:
    """Import an optional library. Raises MissingExtra with the line that installs it."""
    try:
        return import_module(module)
    except ImportError as error:
        raise MissingExtra(f"{purpose} needs the library `{module}`: {INSTALL}") from error
