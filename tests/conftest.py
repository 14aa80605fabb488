"""Fixtures that any test may ask for."""

from __future__ import annotations

from pathlib import Path

import pytest

from d3d.core.errors import D3DError


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """Directory of the real SmolLM2-135M-Instruct, fetched and converted on first use; mark such tests `real_model`."""
    from d3d.models.loading import resolve_model

    try:
        return resolve_model("smollm2-135m")
    except D3DError as error:
        pytest.skip(f"the real SmolLM2-135M is not to be had here: {error}")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of the test's own."""
    directory = tmp_path / "cache"
    monkeypatch.setenv("D3D_CACHE", str(directory))
    return directory
