"""d3d: speculative decoding with a block-diffusion drafter. `load` is where to begin."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from d3d.api import Model as Model
    from d3d.api import load as load
    from d3d.core.types import SamplingParams as SamplingParams
    from d3d.decoding.results import GenerationResult as GenerationResult
    from d3d.decoding.results import StreamChunk as StreamChunk
    from d3d.errors import D3DError as D3DError

_WHERE = {
    "load": "d3d.api",
    "Model": "d3d.api",
    "D3DError": "d3d.errors",
    "SamplingParams": "d3d.core.types",
    "GenerationResult": "d3d.decoding.results",
    "StreamChunk": "d3d.decoding.results",
}

__all__ = ["D3DError", "GenerationResult", "Model", "SamplingParams", "StreamChunk", "load"]


def __getattr__(name: str) -> Any:
    """Public names are imported when they are asked for: `import d3d` and `d3d --help` do not wait
    for torch."""
    if name not in _WHERE:
        raise AttributeError(f"module 'd3d' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_WHERE[name]), name)
