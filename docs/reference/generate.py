"""Writes docs/reference/options.md and presets.md from the config classes.

python docs/reference/generate.py        # rewrites the pages
python docs/reference/generate.py --check  # exit code 1 if they are out of date"""

from __future__ import annotations

import sys
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import BaseModel

from d3d.cli.options import MODEL, SPECULATION
from d3d.cli.options import sampling as sampling_group
from d3d.config import METHOD_ALIASES, METHODS, OPTION_ALIASES
from d3d.engine.params import SamplingParams
from d3d.hub.presets import PresetFile

HERE = Path(__file__).parent
NOTE = "<!-- Written by docs/reference/generate.py; change the config classes instead. -->\n"


def table(headings: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [headings, tuple("---" for _ in headings), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def kind(annotation: Any) -> str:
    """A field's type, for a reader."""
    parts = [one for one in get_args(annotation) if one is not NoneType]
    if get_origin(annotation) is Literal:
        return " or ".join(f"`{value}`" for value in get_args(annotation))
    if NoneType in get_args(annotation) and len(parts) == 1:
        return kind(parts[0])
    if get_origin(annotation) is Annotated:
        return kind(parts[0])
    origin = get_origin(annotation)
    if origin is not None:
        inner = ", ".join(kind(one) for one in parts if one is not Ellipsis)
        return f"{getattr(origin, '__name__', origin)} of {inner}"
    return str(getattr(annotation, "__name__", annotation))


def limits(field: Any) -> str:
    """Its range."""
    signs = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
    parts = [
        f"{sign} {getattr(one, name):g}"
        for one in field.metadata
        for name, sign in signs.items()
        if getattr(one, name, None) is not None
    ]
    return ", ".join(parts)


def flags() -> dict[str, str]:
    """Flag of each option of the command line, by name."""
    groups = (*SPECULATION.parameters, *MODEL.parameters, *sampling_group().parameters)
    found = {}
    for parameter in groups:
        option = parameter.annotation.__metadata__[0]  # its first flag is what typer calls default
        declared = (option.default, *(option.param_decls or ()))
        names = [flag for flag in declared if isinstance(flag, str)]
        names = names or [f"--{parameter.name.replace('_', '-')}"]
        found[parameter.name] = ", ".join(f"`{name}`" for name in names)
    return found


def fields(model: type[BaseModel], known: dict[str, str]) -> str:
    rows = [
        (
            f"`{name}`",
            known.get(name, ""),
            kind(field.annotation),
            limits(field),
            (field.description or "").replace("|", "or"),
        )
        for name, field in model.model_fields.items()
        if name != "method"
    ]
    return table(("Python", "flag", "type", "range", "effect"), rows) if rows else "No options.\n"


def options_page() -> str:
    known = flags()
    parts = [
        "# Options of a request\n",
        NOTE,
        "The method is chosen with `method=` in Python and `--method` (alias `--mode`) in the\n"
        "shell. An option that a method does not have is refused by name. None, the default of\n"
        "every option, means the method's own default, or the preset's.\n",
    ]
    for name, config in METHODS.items():
        aliases = [alias for alias, method in METHOD_ALIASES.items() if method == name]
        also = f" (also: {', '.join(f'`{alias}`' for alias in aliases)})" if aliases else ""
        parts += [
            f"## `{name}`{also}\n",
            f"{config.summary.capitalize()}.\n",
            fields(config, known),
        ]
    rows = [(f"`{alias}`", f"`{ours}`") for alias, ours in OPTION_ALIASES.items()]
    rows.append(("`prompt_lookup_num_tokens`", '`method="ngram"` with `draft_length`'))
    rows.append(("`model` inside `speculative_config`", "the drafter"))
    parts += [
        "## Other names that are understood\n",
        "In Python, and in `--speculative-config JSON` (Python: `speculative_config=`):\n",
        table(("vLLM's or transformers' name", "ours"), rows),
        "## Sampling\n",
        fields(SamplingParams, known),
    ]
    return "\n".join(parts)


def presets_page() -> str:
    rows = [
        (f"`{name}`", kind(field.annotation), "" if field.is_required() else f"`{field.default}`")
        for name, field in PresetFile.model_fields.items()
    ]
    return "\n".join(
        (
            "# Preset files\n",
            NOTE,
            "YAML or JSON, wherever the name of a model may stand. `d3d tune` writes one;\n"
            "`d3d show` explains one. Keys beside these are options of the method "
            "([options](options.md)).\n",
            table(("key", "type", "default"), rows),
        )
    )


def pages() -> dict[Path, str]:
    return {HERE / "options.md": options_page(), HERE / "presets.md": presets_page()}


def main() -> int:
    stale = [
        file
        for file, text in pages().items()
        if not file.exists() or file.read_text(encoding="utf-8") != text
    ]
    if "--check" in sys.argv[1:]:
        print("\n".join(f"{file} is out of date" for file in stale))
        return 1 if stale else 0
    for file in stale:
        file.write_text(pages()[file], encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
