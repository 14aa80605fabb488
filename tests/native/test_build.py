"""Building the C library, and what is said where it can't be built."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from d3d.errors import D3DError
from d3d.native import build


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("D3D_CACHE", str(tmp_path))
    monkeypatch.delenv("D3D_NATIVE", raising=False)
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(build, "load_level", build.load_level.__wrapped__)


def test_it_can_be_turned_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("D3D_NATIVE", "0")
    assert build.why_not() == "the C library is turned off by D3D_NATIVE=0"


def test_a_level_can_only_be_lowered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "cpu_flags", lambda: frozenset(("avx2", "fma", "f16c")))
    assert build.chosen_level("") == "avx2"
    assert build.chosen_level("generic") == "generic"
    with pytest.raises(D3DError, match="this processor runs avx2, generic"):
        build.chosen_level("avx512")


def test_without_a_compiler_one_line_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.setitem(sys.modules, "ziglang", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    reason = build.why_not()
    assert reason is not None
    assert "install gcc or clang, or pip install ziglang" in reason


def test_a_compiler_that_fails_is_quoted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\necho 'x.c:1: error: no such thing' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CC", str(broken))
    reason = build.why_not()
    assert reason is not None
    assert reason.endswith("x.c:1: error: no such thing")
    assert not list((tmp_path / "native").glob("*.so"))


def test_a_cache_that_cannot_be_written_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("D3D_CACHE", str(tmp_path / "file"))
    reason = build.why_not()
    assert reason is not None
    assert "set D3D_CACHE to another directory" in reason
