"""JSON as others can read it: every writer of d3d goes through `to_json`."""

from __future__ import annotations

import json
import math
from typing import Any


def to_json(value: Any, **layout: Any) -> str:
    """As `json.dumps`, with null for NaN and infinity, which JSON does not have. layout: `indent`,
    `sort_keys`, `ensure_ascii`, `default`."""
    try:
        return json.dumps(value, allow_nan=False, **layout)
    except ValueError:
        return json.dumps(_finite(value), allow_nan=False, **layout)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
