"""Whatever d3d writes as JSON is JSON: NaN and infinity, which Python would write, are null."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from d3d.json_text import to_json

SOURCE = Path(__file__).parents[1] / "src" / "d3d"


def refuse(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def test_numbers_that_json_lacks_are_null() -> None:
    value = {"a": [1.5, math.nan, {"b": (math.inf, -math.inf, "NaN")}], "c": None}
    text = to_json(value, indent=1)
    wanted = {"a": [1.5, None, {"b": [None, None, "NaN"]}], "c": None}
    assert json.loads(text, parse_constant=refuse) == wanted
    assert to_json({"b": "é", "a": 1}, sort_keys=True, ensure_ascii=False) == '{"a": 1, "b": "é"}'
    with pytest.raises(TypeError):
        to_json({1, 2})


def test_every_writer_goes_through_it() -> None:
    others = [
        str(file.relative_to(SOURCE))
        for file in SOURCE.rglob("*.py")
        if "json.dump" in file.read_text(encoding="utf-8")
    ]
    assert others == ["json_text.py"]
