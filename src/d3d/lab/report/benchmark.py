"""The report of a benchmark run, and the comparison of two."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from d3d.lab.bench.methods import PEERS, PLAIN
from d3d.lab.bench.metrics import drafting, sameness, speed
from d3d.lab.bench.modelled import ASYNC_MODELLED, LABEL
from d3d.lab.report import run_tables as tables
from d3d.lab.report.run import Run
from d3d.lab.report.run_pictures import pictures
from d3d.lab.report.tables import Section, Table, number, percent

UNSUSPICIOUS = "The program has noticed nothing that would make these figures doubtful."


def report(run: Run, *, with_pictures: bool = True) -> list[Section]:
    """Everything that there is to tell about a run. Raises MissingExtra where pictures are wanted
    and can't be drawn."""
    groups = run.groups
    found = [*([LABEL] if any(row.modelled for row in run.rows) else []), *warnings(run)]
    scores = tables.score_table(groups)
    divergences = tables.divergence_table(run.rows)
    sections = [
        Section("In short", tuple(found) or (UNSUSPICIOUS,), (tables.summary_table(groups),)),
        Section("Speed", tables=(tables.speed_up_table(groups), tables.speed_table(groups))),
        Section("Acceptance", tables=(tables.acceptance_table(groups),)),
        Section(
            "Identity",
            tables=(tables.identity_table(groups), *([divergences] if divergences.rows else [])),
        ),
        *([Section("Task scores", tables=(scores,))] if scores.rows else []),
        *([Section("Pictures", pictures=tuple(pictures(groups)))] if with_pictures else []),
        Section("Where this comes from", tables=tables.provenance_tables(run)),
    ]
    return [_labelled(section) for section in sections]


def _labelled(section: Section) -> Section:
    """Whatever shows modelled times says so beside them."""
    pictures_ = tuple(
        replace(picture, data=_labelled_table(picture.data)) for picture in section.pictures
    )
    return replace(section, tables=tuple(map(_labelled_table, section.tables)), pictures=pictures_)


def _labelled_table(table: Table) -> Table:
    shown = any(
        isinstance(cell, str) and cell.startswith(ASYNC_MODELLED)
        for row in table.rows
        for cell in row
    )
    return replace(table, note=f"{table.note} {LABEL}".strip()) if shown else table


def warnings(run: Run) -> Iterator[str]:
    """What takes meaning from the figures."""
    fixed, sessions = run.provenance["fixed"], run.provenance["sessions"]
    if run.machine_was_busy:
        yield "The machine was at work when the run began: times are not to be trusted."
    if len(sessions) > 1:
        yield f"The command was run {len(sessions)} times into these results; between them the machine may have changed."
    if fixed["ignore_eos"]:
        yield "Answers went on past their natural end (--ignore-eos): acceptance behind it says nothing about real use."
    if fixed["dtype"] != "float32":
        yield f"Computed in {fixed['dtype']}: checking several tokens in one pass rounds otherwise, so near-ties may fall either way."
    for group, rows in run.groups.items():
        where = f"{group.label} on {group.set_name}"
        loops, same, found = sum(row.repeats for row in rows), sameness(rows), drafting(rows)
        if loops:
            yield f"{where}: {loops} of {len(rows)} answers end in a loop; speed on such text means nothing."
        if same is not None and same.other and group.method not in PEERS:
            yield f"{where}: {same.other} answers are not plain decoding's, and rounding does not explain it: a mistake in the program."
        if found is not None and not found.rounds:
            yield f"{where}: not one round was run, so nothing was drafted."
        told = sum(bool(row.warnings) for row in rows)
        if told:
            first = next(row.warnings[0] for row in rows if row.warnings)
            yield f"{where}: {told} answers carry a warning, the first: {first}"


def comparison(one: Run, other: Run) -> list[Section]:
    """What two runs have in common, side by side, and what was different about them."""
    a, b = one.groups, other.groups
    rows = []
    for group in a:
        if group not in b:
            continue
        speeds, drafts, same = (
            (speed(a[group]), speed(b[group])),
            (drafting(a[group]), drafting(b[group])),
            sameness(b[group]),
        )
        ratio = (
            speeds[0].tpot_s / speeds[1].tpot_s if speeds[0].tpot_s and speeds[1].tpot_s else None
        )
        rows.append(
            (
                group.set_name,
                group.label,
                group.setting.max_tokens,
                group.setting.batch,
                number(speeds[0].tokens_per_s, 1),
                number(speeds[1].tokens_per_s, 1),
                number(ratio),
                *(number(one.acceptance_length) if one else None for one in drafts),
                percent(same.identical / same.compared) if same else None,
            )
        )
    headings = (
        *tables.COLUMNS,
        "tokens/s A",
        "tokens/s B",
        "B over A",
        "acceptance length A",
        "B",
        "identical in B",
    )
    note = "B over A: how many times as fast B is, by seconds per token after the first, over whatever prompts each has answered."
    only = [
        (run.name, f"{group.label} on {group.set_name}")
        for run, mine, theirs in ((one, a, b), (other, b, a))
        for group in mine
        if group not in theirs
    ]
    sections = [
        Section(
            "Both",
            (f"A is {one.name}, B is {other.name}.",),
            (Table("A and B", headings, tuple(rows), note),),
        ),
        Section(
            "What differs",
            tables=(_differences(one, other), Table("Only in one", ("run", "group"), tuple(only))),
        ),
    ]
    return [_labelled(section) for section in sections]


def _differences(one: Run, other: Run) -> Table:
    sides = [_facts(run) for run in (one, other)]
    names = [
        name
        for name in dict.fromkeys([*sides[0], *sides[1]])
        if sides[0].get(name) != sides[1].get(name)
    ]
    return Table(
        "Settings, sets and versions",
        ("", "A", "B"),
        tuple((name, sides[0].get(name), sides[1].get(name)) for name in names),
    )


def _facts(run: Run) -> dict[str, str]:
    last = run.provenance["sessions"][-1]
    methods: dict[str, str] = {}
    for session in run.provenance["sessions"]:
        methods |= {
            f"method {name}": str(about)
            for name, about in session["methods"].items()
            if name != PLAIN
        }
    facts = {name: str(value) for name, value in run.provenance["fixed"].items()}
    facts |= {
        f"set {name}": f"{about['asked']} of {about['sha256'][:12]}"
        for name, about in run.provenance["sets"].items()
    }
    return (
        facts | methods | {f"version of {name}": value for name, value in last["versions"].items()}
    )
