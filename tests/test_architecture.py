"""The seams: imports run downwards, names are unique, and no piece grows beyond a newcomer's
patience."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from importlinter.cli import EXIT_STATUS_SUCCESS, lint_imports

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "d3d"
FILE_LINES, BODY_LINES, PARAMETERS = 400, 80, 10


def trees() -> Iterator[tuple[str, str, ast.Module]]:
    """Name, text and syntax tree of every source file."""
    for file in sorted(SOURCE.rglob("*.py")):
        text = file.read_text(encoding="utf-8")
        yield str(file.relative_to(SOURCE)), text, ast.parse(text)


def functions() -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for name, _, tree in trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield f"{name}: {node.name}", node


def is_command(where: str, node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether its parameters are the options of a command, which it declares."""
    every = [*node.args.args, *node.args.kwonlyargs]
    declared = [one for one in every if one.annotation and "Annotated" in ast.dump(one.annotation)]
    return where.startswith("cli/") and bool(declared)


def test_imports_run_downwards_only() -> None:
    config = str(ROOT / "pyproject.toml")
    assert lint_imports(config_filename=config, cache_dir=None) == EXIT_STATUS_SUCCESS


def test_no_class_name_occurs_twice() -> None:
    places = defaultdict(list)
    for name, _, tree in trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(name)
    assert {name: where for name, where in places.items() if len(where) > 1} == {}


def test_files_are_short() -> None:
    long = {name: lines for name, text, _ in trees() if (lines := text.count("\n")) > FILE_LINES}
    assert long == {}


def test_function_bodies_are_short() -> None:
    long = {}
    for where, node in functions():
        lines = (node.end_lineno or 0) - node.body[0].lineno + 1
        if lines > BODY_LINES:
            long[where] = lines
    assert long == {}


def test_functions_take_few_parameters() -> None:
    """Options that a command declares are not counted."""
    many = {}
    for where, node in functions():
        count = len([*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs])
        is_method = bool(node.args.args) and node.args.args[0].arg in ("self", "cls")
        if count - is_method > PARAMETERS and not is_command(where, node):
            many[where] = count
    assert many == {}
