"""What the README tells people to type exists, and its Python example runs."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import typer

from d3d.cli.app import app

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^ {4}d3d (.+)$", README, re.MULTILINE)
TARGETS = re.findall(r"^ {4}make ([a-z-]+)", README, re.MULTILINE)
PACKAGES = re.findall(r"^ {6}([a-z_]+(?:/|\.py)) ", README, re.MULTILINE)


def test_there_is_something_to_check() -> None:
    assert len(COMMANDS) >= 10
    assert set(TARGETS) >= {"demo", "test"}
    assert len(PACKAGES) >= 10


@pytest.mark.parametrize("line", COMMANDS)
def test_each_command_parses(line: str) -> None:
    name, *arguments = shlex.split(line)
    command = typer.main.get_command(app).commands[name]  # type: ignore[attr-defined]
    while hasattr(command, "commands"):  # a group, such as bench
        name, *arguments = arguments
        command = command.commands[name]
    context = command.make_context(name, arguments)  # raises for an unknown flag or a missing value
    assert context.params


@pytest.mark.parametrize("target", sorted(set(TARGETS)))
def test_each_make_target_exists(target: str) -> None:
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE)


@pytest.mark.parametrize("package", PACKAGES)
def test_each_part_of_the_map_exists(package: str) -> None:
    assert (ROOT / "src" / "d3d" / package).exists()


@pytest.mark.real_model
def test_the_python_example_runs(smollm2: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = re.findall(r"```python\n(.+?)```", README, re.DOTALL)
    exec(compile(example, "README.md", "exec"), {})
    assert capsys.readouterr().out.strip()
