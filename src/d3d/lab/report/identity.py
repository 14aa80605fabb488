"""What a run shows about identity alone: how many answers are plain decoding's own, and where the
others part from it."""

from __future__ import annotations

from typing import Any

from d3d.lab.bench.methods import PEERS
from d3d.lab.bench.metrics import Group, sameness
from d3d.lab.bench.rows import Row
from d3d.lab.report.run import ALL_SETS, Run
from d3d.lab.report.run_tables import divergence_table, identity_table
from d3d.lab.report.tables import Section
from d3d.model.int8 import precision


def identity_sections(run: Run) -> list[Section]:
    """For people."""
    divergences = divergence_table(run.rows)
    fixed = run.provenance["fixed"]
    kind = precision(fixed["dtype"], fixed.get("quantize"))
    text = f"{fixed['target']}, {kind} on {fixed['device']}, temperature {fixed['temperature']}: answers against plain decoding's."
    return [
        Section(
            "Identity",
            (text,),
            (identity_table(run.groups), *([divergences] if divergences.rows else [])),
        )
    ]


def identity_record(run: Run) -> dict[str, Any]:
    """For programs, as plain JSON values: `mistakes` counts answers of our own methods that part
    from plain's where rounding does not explain it; `methods` counts by set and method,
    `divergences` has each answer that parts, with its position and gap."""
    groups = {group: rows for group, rows in run.groups.items() if group.set_name != ALL_SETS}
    counts = [_counts(group, rows) for group, rows in groups.items() if sameness(rows) is not None]
    return {
        "settings": run.provenance["fixed"],
        "sets": run.provenance["sets"],
        "commands": [session["command"] for session in run.provenance["sessions"]],
        "mistakes": len(mistakes(run)),
        "methods": counts,
        "divergences": [
            _divergence(row)
            for row in run.rows
            if row.identity is not None and not row.identity.identical
        ],
    }


def mistakes(run: Run) -> list[Row]:
    """Answers of our own methods that part from plain's where rounding does not explain it."""
    return [
        row
        for row in run.rows
        if row.identity is not None
        and not row.identity.identical
        and not row.identity.is_rounding
        and row.method not in PEERS
    ]


def _counts(group: Group, rows: list[Row]) -> dict[str, Any]:
    found = sameness(rows)
    assert found is not None
    return {
        "set": group.set_name,
        "method": group.method,
        "setting": group.setting.model_dump(),
        "compared": found.compared,
        "identical": found.identical,
        "rounding": found.rounding,
        "other": found.other,
        "tokens": sum(row.completion_tokens for row in rows),
    }


def _divergence(row: Row) -> dict[str, Any]:
    assert row.identity is not None
    where = {
        "set": row.set_name,
        "method": row.method,
        "setting": row.setting.model_dump(),
        "prompt_id": row.prompt_id,
        "turn": row.turn,
    }
    return (
        where | {"tokens": row.completion_tokens} | row.identity.model_dump(exclude={"identical"})
    )
