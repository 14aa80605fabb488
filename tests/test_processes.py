"""Child processes that run one function."""

from __future__ import annotations

import os
import sys
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from d3d.processes import ChildProcess


class ThereEvaluated:
    """Becomes the value of an expression where it is unpickled."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        imported = "__import__('sys').path, __import__('os').environ.get('PYTHONPATH')"
        return eval, (imported,)


def test_a_child_imports_what_its_parent_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "subprocess.py").write_text("raise SystemExit('of the working directory')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", "")
    child = ChildProcess(Connection.send, ThereEvaluated())
    paths, environment = child.connection.recv()
    child.connection.close()
    child.wait(10.0)
    assert not child.is_alive()
    assert paths == [os.path.abspath(path) for path in sys.path]
    assert environment == ""  # programs that the child starts get the user's own
