"""Samples of a measurement on disk, one a line, each of them there before the next one is taken."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from d3d.errors import InvalidRequest


class Samples:
    """Seconds by key. A file that was torn goes on behind its last whole line."""

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        """Raises InvalidRequest for a file of samples that were taken otherwise."""
        self._path = path
        self._known: dict[str, list[float]] = {}
        if not path.is_file():
            path.write_text(json.dumps({"settings": settings}) + "\n", encoding="utf-8")
            return
        content = path.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]
        if len(whole) < len(content):
            path.write_bytes(whole)
        try:
            first, *rest = [json.loads(line) for line in whole.splitlines()]
            before = first["settings"]
            self._known = {json.dumps(one["key"]): one["seconds"] for one in rest}
        except (ValueError, KeyError, TypeError) as error:
            raise InvalidRequest(
                f"{path} is damaged ({error}); remove it to measure from the start"
            ) from error
        if before != settings:
            differs = ", ".join(name for name in settings if before.get(name) != settings[name])
            raise InvalidRequest(
                f"{path} holds samples taken with another {differs}; remove it, or take another name for this profile"
            )

    def __contains__(self, key: list[Any]) -> bool:
        return json.dumps(key) in self._known

    def add(self, key: list[Any], seconds: list[float]) -> None:
        self._known[json.dumps(key)] = seconds
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"key": key, "seconds": seconds}) + "\n")

    def of(self, keys: Iterable[list[Any]]) -> list[float]:
        """All samples of these keys."""
        return [value for key in keys for value in self._known.get(json.dumps(key), [])]
