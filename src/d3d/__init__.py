"""d3d: speculative decoding with a block-diffusion drafter. Start with `load`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from d3d.api import Model as Model
    from d3d.engine.sampling import SamplingParams as SamplingParams
    from d3d.errors import D3DError as D3DError
    from d3d.errors import InvalidCheckpoint as InvalidCheckpoint
    from d3d.errors import InvalidRequest as InvalidRequest
    from d3d.errors import MissingExtra as MissingExtra
    from d3d.errors import WorkerFailed as WorkerFailed
    from d3d.handle import Handle as Handle
    from d3d.loader import load as load
    from d3d.results import GenerationResult as GenerationResult
    from d3d.results import StreamChunk as StreamChunk

_MODULES = {
    "load": "d3d.loader",
    "Model": "d3d.api",
    "Handle": "d3d.handle",
    "SamplingParams": "d3d.engine.sampling",
    "GenerationResult": "d3d.results",
    "StreamChunk": "d3d.results",
    "D3DError": "d3d.errors",
    "InvalidCheckpoint": "d3d.errors",
    "InvalidRequest": "d3d.errors",
    "MissingExtra": "d3d.errors",
    "WorkerFailed": "d3d.errors",
}

__all__ = [
    "D3DError",
    "GenerationResult",
    "Handle",
    "InvalidCheckpoint",
    "InvalidRequest",
    "MissingExtra",
    "Model",
    "SamplingParams",
    "StreamChunk",
    "WorkerFailed",
    "load",
]


def __getattr__(name: str) -> Any:
    """Import public names on first use, so that `import d3d` and `d3d --help` do not load torch."""
    if name not in _MODULES:
        raise AttributeError(f"module 'd3d' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_MODULES[name]), name)
