"""A config may declare millions of positions; what is allocated follows the text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import d3d
from support.tiny_model import write_tiny_drafter, write_tiny_target

POSITIONS = 10_485_760


class Largest(TorchDispatchMode):
    """Remembers the largest tensor that an operator returned, in elements."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
        self.numel = max(self.numel, *sizes, 0)
        return out


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("positions")
    target = write_tiny_target(path / "target")
    write_tiny_drafter(path / "drafter", target)
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | {"max_position_embeddings": POSITIONS}))
    return path


@pytest.mark.parametrize("engine", ["native", "transformers"])
def test_no_tensor_is_as_long_as_the_positions(directory: Path, engine: str) -> None:
    target, drafter = str(directory / "target"), directory / "drafter"
    with Largest() as largest:
        model = d3d.load(target, drafter, device="cpu", dtype="float32", engine=engine)
        assert model.target.max_length == POSITIONS
        for method in ("plain", "serial", "fused") if engine == "native" else ("plain", "serial"):
            model.generate("the cat", method=method, max_tokens=4)
        assert largest.numel < 200_000
        # so is a request that may be long
        stream = model.stream("the cat", method="plain", max_tokens=POSITIONS - 100)
        next(stream)
        stream.close()  # type: ignore[attr-defined]
    assert largest.numel < 200_000
