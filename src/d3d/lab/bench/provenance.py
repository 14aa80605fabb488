"""Where results come from: what was asked, of which files, with which versions, on which machine,
by which command."""

from __future__ import annotations

import json
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from d3d.errors import InvalidRequest
from d3d.machine import machine, versions

PROVENANCE_FILE = "provenance.json"
FORMAT = 1


def session(methods: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """One time that the command was run. methods: what each says of itself."""
    return {
        "command": ["d3d", *sys.argv[1:]],
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "versions": versions(),
        "machine": machine(),
        "methods": methods,
    }


def read_provenance(directory: Path) -> dict[str, Any]:
    """Raises InvalidRequest where there is none, or it is damaged."""
    file = directory / PROVENANCE_FILE
    try:
        content: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        if content["format"] != FORMAT:
            raise InvalidRequest(
                f"{file}: written by another version of d3d (format {content['format']}); run the benchmark again"
            )
        return content
    except FileNotFoundError as error:
        raise InvalidRequest(
            f"{directory} holds no {PROVENANCE_FILE}; give the directory of a benchmark run"
        ) from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InvalidRequest(f"{file} can't be read ({error}); run the benchmark again") from error


def begin(
    directory: Path,
    fixed: dict[str, Any],
    sets: dict[str, dict[str, Any]],
    methods: dict[str, dict[str, Any]],
) -> None:
    """Note that a run begins or goes on. fixed: what must not change within one run; sets: which
    files were read; methods: what each says of itself.

    Raises InvalidRequest for what is not the run that the directory holds.
    """
    file = directory / PROVENANCE_FILE
    known: dict[str, Any] = {"format": FORMAT, "fixed": fixed, "sets": {}, "sessions": []}
    if file.is_file():
        known = read_provenance(directory)
    for name in fixed:
        _must_agree(directory, name, known["fixed"].get(name), fixed[name])
    for name, about in sets.items():
        _must_agree(
            directory, f"set {name}", known["sets"].get(name, about)["sha256"], about["sha256"]
        )
    for name, about in methods.items():
        earlier = [
            before["methods"][name] for before in known["sessions"] if name in before["methods"]
        ]
        _must_agree(directory, f"method {name}", (earlier or [about])[-1], about)
    for name, about in sets.items():
        known["sets"][name] = about | {
            "asked": max(about["asked"], known["sets"].get(name, about)["asked"])
        }
    known["sessions"].append(session(methods))
    work = file.with_suffix(".partial")
    work.write_text(json.dumps(known, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    work.replace(file)


def _must_agree(directory: Path, name: str, before: Any, now: Any) -> None:
    if before != now:
        raise InvalidRequest(
            f"{directory} holds a run with another {name}: {before!r}, not {now!r}; take another name for this one, or go on as it began"
        )
