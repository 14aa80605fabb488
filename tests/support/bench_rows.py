"""Hand-made rows of benchmark results: seconds and rounds are given, so every figure can be checked
on paper."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from d3d.engine.round import Round
from d3d.lab.bench.answers import Setting
from d3d.lab.bench.rows import Identity, Row, RowTiming, acceptance_of

Deliveries = list[tuple[float, int]]


def row(
    method: str,
    prompt_id: str,
    deliveries: Deliveries,
    rounds: list[Round] | None = None,
    **fields: Any,
) -> Row:
    """An answer of the set `tiny`, alone in its batch, identical to plain's by default."""
    tokens = sum(count for _, count in deliveries)
    first, last = deliveries[0][0], deliveries[-1][0]
    timing = RowTiming(
        ttft_s=first,
        total_s=last,
        tpot_s=(last - first) / (tokens - 1) if len(deliveries) > 1 else None,
        batch_s=last,
        batch_size=1,
        deliveries=deliveries,
    )
    defaults: dict[str, Any] = {
        "set_name": "tiny",
        "turn": 0,
        "setting": Setting(max_tokens=16, draft_length=None if rounds is None else 2),
        "prompt_tokens": 10,
        "completion_tokens": tokens,
        "finish_reason": "stop",
        "identity": None
        if method == "plain"
        else Identity(identical=True, by="ids", plain_tokens=tokens),
        "peak_memory_bytes": 1 << 30,
        "repeats": False,
        "score": None,
        "warnings": [],
        "text": "hello",
        "token_ids": list(range(tokens)),
    }
    return Row(
        method=method,
        prompt_id=prompt_id,
        timing=timing,
        acceptance=None if rounds is None else acceptance_of(rounds),
        **(defaults | fields),
    )


def example_rows() -> list[Row]:
    """Two prompts, plain and serial. Plain takes 0.4 s for 4 further tokens and 0.2 s for 2; serial
    0.2 s and 0.2 s."""
    return [
        row("plain", "a", [(0.1, 1), (0.2, 1), (0.3, 1), (0.4, 1), (0.5, 1)]),
        row(
            "serial",
            "a",
            [(0.1, 1), (0.2, 3), (0.3, 1)],
            [Round(2, 2, 3, 0.04, 0.05), Round(1, 0, 1, 0.02, 0.07)],
        ),
        row("plain", "b", [(0.1, 1), (0.2, 1), (0.3, 1)]),
        row("serial", "b", [(0.1, 1), (0.3, 2)], [Round(2, 1, 2, 0.1, 0.1)]),
    ]


def write_run(directory: Path, rows: list[Row], **fixed: Any) -> Path:
    """Write a run's directory."""
    directory.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(row.model_dump(mode="json", by_alias=True)) for row in rows]
    (directory / "results.jsonl").write_text("\n".join(lines) + "\n")
    session = {
        "command": ["d3d", "bench", "run", "x|y"],
        "date": "2026-01-01T00:00:00+00:00",
        "versions": {"d3d": "0", "python": "3", "torch": "2", "transformers": "5"},
        "machine": {
            "processor": "abacus",
            "cores": 2,
            "threads": 2,
            "gpus": [],
            "load_at_start": 0.1,
        },
        "methods": {"plain": {}, "serial": {"fingerprint": "abc"}},
    }
    provenance = {
        "format": 1,
        "fixed": {
            "target": "tiny",
            "dtype": "float32",
            "device": "cpu",
            "threads": 2,
            "temperature": 0.0,
            "ignore_eos": False,
        }
        | fixed,
        "sets": {
            "tiny": {
                "title": "Tiny <set>",
                "sha256": "0123456789abcdef",
                "available": 5,
                "asked": 2,
            }
        },
        "sessions": [session],
    }
    (directory / "provenance.json").write_text(json.dumps(provenance))
    return directory
