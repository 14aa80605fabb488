"""What the commands of `d3d bench` share."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from d3d.api import Model
    from d3d.lab.bench.harness import Plan
    from d3d.lab.bench.methods import MethodOptions
    from d3d.lab.bench.rows import Row

RESULTS = Path("results")
DirectoryOption = Annotated[Path, typer.Option("--results", help="Directory that holds the runs.")]


def directory_of(results: Path, name: str) -> Path:
    """Where a run of this name lies. Raises InvalidRequest for a name that is a path."""
    from d3d.errors import InvalidRequest

    if not name or name in (".", "..") or Path(name).name != name:
        raise InvalidRequest(
            f"name: {name!r} can't be the name of a directory in {results}; take a plain word (--results names the place)"
        )
    return results / name


def measure(plan: Plan, model: Model, methods: Sequence[str], options: MethodOptions) -> list[Row]:
    """Run a plan, new or resumed, with its progress on standard error; all rows of the run."""
    from d3d.cli.console import meter
    from d3d.lab.bench.harness import Benchmark
    from d3d.lab.bench.methods import make_methods

    made = make_methods(methods, model, options, plan.sampling)
    try:
        benchmark = Benchmark(plan, model, made)
        with meter(benchmark.total) as progress:
            return benchmark.run(progress.show)
    finally:
        for method in made:
            method.close()
        model.close()
