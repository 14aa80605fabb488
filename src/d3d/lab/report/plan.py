"""Tables of modelled figures. Each of them says that they are."""

from __future__ import annotations

from collections.abc import Sequence

from d3d.engine.metrics import ratio
from d3d.lab.plan.plan import Advice, Option
from d3d.lab.report.tables import Table, milliseconds, number, percent

MODELLED = "modelled"

OPTION_HEADINGS = (
    "mode",
    "ms a token",
    "over plain",
    "tokens a round",
    "ms a round",
    "verify",
    "draft",
    "switch",
    "rest",
    "late",
    "note",
)


def options_table(options: Sequence[Option], title: str) -> Table:
    """The modes, and a breakdown of the time of each."""
    plain = options[0].tpot_s
    rows = []
    for option in options:
        sums = option.modelled
        parts = (sums.verify_s, sums.draft_s, sums.switch_s, sums.rest_s)
        rows.append(
            (
                option.label,
                milliseconds(option.tpot_s, 2),
                number(ratio(plain, option.tpot_s)),
                number(sums.acceptance_length),
                milliseconds(ratio(sums.seconds, sums.rounds), 2),
                *(percent(ratio(part, sums.seconds)) for part in parts),
                sums.late if sums.mode == "async" else None,
                option.note,
            )
        )
    note = (
        "All figures are modelled, none is measured. Draft: time in which the target waits for a "
        "draft. Late: rounds whose successors were not ready when they were wanted."
    )
    return Table(f"{title} ({MODELLED})", OPTION_HEADINGS, tuple(rows), note)


def advice_table(changes: Sequence[Advice]) -> Table:
    rows = tuple(
        (
            change.change,
            number(change.gain),
            ": ".join(filter(None, (change.option.label, change.option.note))),
            milliseconds(change.option.tpot_s, 2),
            change.proviso,
        )
        for change in changes
    )
    note = (
        "Each by itself, against the best mode above. Fewer layers: as if acceptance stayed as it "
        "is; the condition says how far it may fall."
    )
    headings = ("change", "times as fast", "with", "ms a token", "provided")
    return Table(f"What to change ({MODELLED})", headings, rows, note)
