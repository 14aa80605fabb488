from __future__ import annotations

from pathlib import Path

from importlinter.cli import EXIT_STATUS_SUCCESS, lint_imports

ROOT = Path(__file__).parents[1]


def test_imports_run_downwards_only() -> None:
    assert (
        lint_imports(config_filename=str(ROOT / "pyproject.toml"), cache_dir=None)
        == EXIT_STATUS_SUCCESS
    )
