"""A draft thread on a CPU uses one torch thread and leaves the others' setting unchanged."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import d3d
from d3d.methods.async_.packed_pass import PackedSession
from support.tiny_model import write_tiny_drafter, write_tiny_target


@pytest.fixture
def threads() -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield 3
    torch.set_num_threads(before)


def test_it_has_one_and_everything_else_as_many_as_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threads: int
) -> None:
    seen = []
    original = PackedSession.prepare

    def watch(self: PackedSession, *arguments: Any) -> Any:
        seen.append(torch.get_num_threads())
        return original(self, *arguments)

    monkeypatch.setattr(PackedSession, "prepare", watch)
    target = write_tiny_target(tmp_path / "target")
    model = d3d.load(
        str(target), write_tiny_drafter(tmp_path / "drafter", target), dtype="float32", device="cpu"
    )
    try:
        for _ in range(2):
            model.generate("hello", mode="async", placement="thread", max_tokens=12)
            assert torch.get_num_threads() == threads
    finally:
        model.close()
    assert set(seen) == {1}
