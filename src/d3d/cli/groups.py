"""Groups of options that commands take as one argument, and their order in the help."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from typer.core import TyperCommand

from d3d.errors import InvalidRequest
from d3d.inputs import input_path
from d3d.text.prompts import check_unicode


class CheckedCommand(TyperCommand):
    """Refuses values that no option has a use for (numbers that are not finite, text that is not
    Unicode, names that no file can have), and expands ~ in paths."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        rest = super().parse_args(ctx, args)
        for parameter in self.params:
            name = parameter.name or ""
            given = ctx.params.get(name)
            for value in given if isinstance(given, list | tuple) else [given]:
                if isinstance(value, float) and not math.isfinite(value):
                    raise InvalidRequest(f"{parameter.opts[-1]}: {value} is not a finite number")
                if isinstance(value, str):
                    check_unicode(value, parameter.opts[-1])
            if isinstance(given, Path):
                ctx.params[name] = input_path(given)
        return rest


class Group(NamedTuple):
    """Options that a command takes as one argument."""

    name: str
    """Name of the argument."""
    parameters: tuple[inspect.Parameter, ...]
    collect: Callable[[dict[str, Any]], Any]
    """Converts the options' values to the argument."""


def takes(*groups: Group) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the options of groups."""

    def with_groups(command: Callable[..., None]) -> Callable[..., None]:
        parameters = inspect.signature(command, eval_str=False).parameters.values()
        module = inspect.getmodule(command)
        names = vars(module) if module is not None else {}
        shared = {group.name for group in groups}
        kept = [
            parameter.replace(
                annotation=eval(parameter.annotation, dict(names))
                if isinstance(parameter.annotation, str)
                else parameter.annotation,
                kind=inspect.Parameter.KEYWORD_ONLY,
            )
            for parameter in parameters
            if parameter.name not in shared
        ]

        @functools.wraps(command)
        def run(**values: Any) -> None:
            for group in groups:
                given = {
                    parameter.name: values.pop(parameter.name) for parameter in group.parameters
                }
                values[group.name] = group.collect(given)
            command(**values)

        shown = sorted(
            [*kept, *(parameter for group in groups for parameter in group.parameters)], key=_rank
        )
        run.__signature__ = inspect.Signature(shown)  # type: ignore[attr-defined]
        run.__annotations__ = {}
        return run

    return with_groups


PANELS = (
    "Server",
    "Model",
    "Speculation",
    "Sampling",
    None,
    "Output",
    "Speculation, further",
    "Sampling, further",
)
"""Panels of the help, in order, beginning with what a newcomer needs."""


def _rank(parameter: inspect.Parameter) -> int:
    """Sort key of an option in the help: arguments first, then by panel."""
    info = parameter.annotation.__metadata__[0]
    if isinstance(info, typer.models.ArgumentInfo):
        return -1
    return PANELS.index(info.rich_help_panel)


def option(
    name: str, kind: Any, default: Any, text: str, panel: str, *flags: str, hidden: bool = False
) -> inspect.Parameter:
    declarations = flags or (f"--{name.replace('_', '-')}",)
    info = typer.Option(*declarations, help=text, rich_help_panel=panel, hidden=hidden)
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=default,
        annotation=Annotated[kind, info],
    )
