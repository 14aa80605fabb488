"""What is told where an optional library is absent."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from d3d.errors import MissingExtra

INSTALL = "pip install 'd3d-decoding[bench]'"


def needed(module: str, purpose: str) -> Any:
    """The module. Raises MissingExtra with the line that installs it."""
    try:
        return import_module(module)
    except ImportError as error:
        raise MissingExtra(f"{purpose} needs the library `{module}`: {INSTALL}") from error
