"""What `d3d evaluate` prints."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from d3d.lab.report.tables import Table, number
from d3d.train.acceptance import Acceptance, total
from d3d.train.outcome_replay import Hits, total_hits

Key = tuple[str, float]
"""Source and temperature of answers."""


def acceptance_record(
    groups: dict[Key, Acceptance], draft_length: int, answers: int
) -> dict[str, Any]:
    """JSON-ready: acceptance of all rounds, and by source and by temperature."""
    whole = total(draft_length, groups.values())
    sources = {
        name: [group for (source, _), group in groups.items() if source == name]
        for name, _ in sorted(groups)
    }
    by_temperature = {
        f"{key:g}": [group for (_, at), group in groups.items() if at == key]
        for key in sorted({at for _, at in groups})
    }
    return {
        "answers": answers,
        "draft_length": draft_length,
        "rounds": whole.rounds,
        "acceptance_length": whole.acceptance_length,
        "acceptance_length_macro": whole.acceptance_length_macro,
        "acceptance_at": whole.acceptance_at,
        "num_accepted_histogram": whole.histogram,
        "bonus_recall": {str(top): recall for top, recall in whole.bonus_recall.items()},
        "by_source": {name: _short(total(draft_length, parts)) for name, parts in sources.items()},
        "by_temperature": {
            name: _short(total(draft_length, parts)) for name, parts in by_temperature.items()
        },
    }


def add_hits(record: dict[str, Any], hits: dict[Key, Hits]) -> None:
    """Hit rates of all rounds, and by source and by temperature."""
    record |= total_hits(hits.values()).to_dict()
    for name, part in record["by_source"].items():
        part["hit_rate"] = _rates(hit for (source, _), hit in hits.items() if source == name)
    for name, part in record["by_temperature"].items():
        part["hit_rate"] = _rates(
            hit for (_, temperature), hit in hits.items() if f"{temperature:g}" == name
        )


def hit_table(record: dict[str, Any]) -> Table:
    """Hit rate by budget, of all rounds and by the verdict's num_accepted."""
    wanting = record["rounds_wanting"]
    headings = ("outcomes", "hit rate", *(f"{kept} accepted" for kept in range(len(wanting))))
    rows = [("rounds", str(sum(wanting)), *map(str, wanting))]
    for budget, rate in record["hit_rate"].items():
        rows.append(
            (
                budget,
                number(rate, 3) or "-",
                *(number(at) or "-" for at in record["hit_rate_at"][budget]),
            )
        )
    return Table(
        f"Hit rate, acceptance length {record['acceptance_length']:.2f}", headings, tuple(rows)
    )


def _rates(hits: Iterable[Hits]) -> dict[str, float | None]:
    return {str(budget): rate for budget, rate in total_hits(hits).hit_rate.items()}


def _short(acceptance: Acceptance) -> dict[str, Any]:
    return {
        "answers": acceptance.answers,
        "rounds": acceptance.rounds,
        "acceptance_length": acceptance.acceptance_length,
        "acceptance_length_macro": acceptance.acceptance_length_macro,
    }
