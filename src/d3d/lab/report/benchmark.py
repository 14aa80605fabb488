"""Reports of benchmark runs: one run, two compared, and identity alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from d3d.lab.bench.answers import PLAIN
from d3d.lab.bench.methods import PEERS
from d3d.lab.bench.metrics import RowGroup, group_of
from d3d.lab.bench.own import ASYNC_MODELLED, LABEL
from d3d.lab.bench.results import ALL_SETS, BenchRun
from d3d.lab.bench.rows import Row
from d3d.lab.report import run_tables as tables
from d3d.lab.report.figures import GroupFigures, figures_of
from d3d.lab.report.run_pictures import pictures
from d3d.lab.report.tables import Section, Table, number, percent, tabulate

UNSUSPICIOUS = "No reason was found to doubt these figures."


def report(run: BenchRun, *, with_pictures: bool = True) -> list[Section]:
    """The full report of a run. Raises MissingExtra if pictures are wanted and matplotlib is
    missing."""
    found = figures_of(run.groups)
    told = (*([LABEL] if any(row.modelled for row in run.rows) else []), *warnings(run))
    scores = tables.score_tables(found)
    sections = [
        Section("In short", told or (UNSUSPICIOUS,), (tables.summary_table(found),)),
        Section("Speed", tables=(tables.speed_up_table(found), tables.speed_table(found))),
        Section("Acceptance", tables=(tables.acceptance_table(found),)),
        Section(
            "Identity", tables=(tables.identity_table(found), *tables.divergence_tables(run.rows))
        ),
        *([Section("Task scores", tables=scores)] if scores else []),
        *([Section("Pictures", pictures=tuple(pictures(found)))] if with_pictures else []),
        provenance_section(run),
    ]
    return [_labelled(section) for section in sections]


def provenance_section(run: BenchRun) -> Section:
    return Section("Where this comes from", tables=tables.provenance_tables(run))


def _labelled(section: Section) -> Section:
    """Say that times are modelled wherever they are shown."""

    def label(table: Table) -> Table:
        cells = (cell for row in table.rows for cell in row)
        shown = any(isinstance(cell, str) and cell.startswith(ASYNC_MODELLED) for cell in cells)
        return replace(table, note=f"{table.note} {LABEL}".strip()) if shown else table

    return replace(
        section,
        tables=tuple(map(label, section.tables)),
        pictures=tuple(replace(picture, data=label(picture.data)) for picture in section.pictures),
    )


def warnings(run: BenchRun) -> Iterator[str]:
    """Reasons to doubt the figures."""
    fixed, sessions = run.provenance["fixed"], run.provenance["sessions"]
    if run.machine_was_busy:
        yield "The machine was at work when the run began: do not trust its times."
    if len(sessions) > 1:
        yield (
            f"These results come from {len(sessions)} runs of the command; the machine may have "
            "changed between them."
        )
    if fixed["ignore_eos"]:
        yield (
            "Answers went on past their natural end (--ignore-eos): acceptance after it says "
            "nothing about real use."
        )
    if fixed["dtype"] != "float32":
        yield (
            f"Computed in {fixed['dtype']}: a pass over several tokens rounds differently, so "
            "near-ties may fall either way."
        )
    failed: dict[RowGroup, list[str]] = {}
    for row in run.rows:
        if row.error is not None:
            failed.setdefault(group_of(row), []).append(row.error)
    for group, errors in failed.items():
        yield (
            f"{group.label} on {group.set_name}: {len(errors)} answers failed and are in no "
            f"figure, the first: {errors[0]}"
        )
    for figures in figures_of(run.groups):
        for text in _group_warnings(figures):
            yield f"{figures.group.label} on {figures.group.set_name}: {text}"


def _group_warnings(figures: GroupFigures) -> Iterator[str]:
    rows, counts = figures.rows, figures.identity
    loops = sum(row.repeats for row in rows)
    if loops:
        yield f"{loops} of {len(rows)} answers end in a loop; speed on such text means nothing."
    if counts is not None and counts.other and figures.method not in PEERS:
        yield (
            f"{counts.other} answers differ from plain decoding's, and rounding does not explain "
            "it: a mistake in the program."
        )
    if figures.rounds is not None and not figures.rounds.rounds:
        yield "not one round was run, so nothing was drafted."
    told = [row.warnings[0] for row in rows if row.warnings]
    if told:
        yield f"{len(told)} answers carry a warning, the first: {told[0]}"


def comparison(a: BenchRun, b: BenchRun) -> list[Section]:
    """Groups that two runs share, side by side, and the differences between the runs."""
    found = [{figures.group: figures for figures in figures_of(run.groups)} for run in (a, b)]
    pairs = [(found[0][group], found[1][group]) for group in found[0] if group in found[1]]
    columns: dict[str, Callable[[tuple[GroupFigures, GroupFigures]], Any]] = {
        "tokens/s A": lambda pair: number(pair[0].speed.tokens_per_s, 1),
        "tokens/s B": lambda pair: number(pair[1].speed.tokens_per_s, 1),
        "B over A": lambda pair: _ratio(pair[0].speed.tpot_s, pair[1].speed.tpot_s),
        "acceptance length A": lambda pair: number(pair[0].acceptance_length),
        "B": lambda pair: number(pair[1].acceptance_length),
        "identical in B": lambda pair: _identical_share(pair[1]),
    }
    table = tables.group_table(
        "A and B",
        [(pair[0], pair) for pair in pairs],
        columns,
        "B over A: how many times as fast B is, by seconds per token after the first, each over "
        "the prompts that it has answered.",
    )
    only = [(a.name, group) for group in found[0] if group not in found[1]]
    only += [(b.name, group) for group in found[1] if group not in found[0]]
    groups = tuple((name, f"{group.label} on {group.set_name}") for name, group in only)
    sections = [
        Section("Both", (f"A is {a.name}, B is {b.name}.",), (table,)),
        Section(
            "What differs",
            tables=(_differences(a, b), Table("Only in one", ("run", "group"), groups)),
        ),
    ]
    return [_labelled(section) for section in sections]


def _ratio(other_s: float | None, own_s: float | None) -> str | None:
    return number(other_s / own_s) if other_s and own_s else None


def _identical_share(figures: GroupFigures) -> str | None:
    counts = figures.identity
    return None if counts is None else percent(counts.identical / counts.compared)


def _differences(a: BenchRun, b: BenchRun) -> Table:
    facts = _facts(a), _facts(b)
    names = dict.fromkeys([*facts[0], *facts[1]])
    return tabulate(
        "Settings, sets and versions",
        [name for name in names if facts[0].get(name) != facts[1].get(name)],
        {
            "": lambda name: name,
            "A": lambda name: facts[0].get(name),
            "B": lambda name: facts[1].get(name),
        },
    )


def _facts(run: BenchRun) -> dict[str, str]:
    known = run.provenance
    facts = {name: str(value) for name, value in known["fixed"].items()}
    for name, about in known["sets"].items():
        facts[f"set {name}"] = f"{about['asked']} of {about['sha256'][:12]}"
    for session in known["sessions"]:
        methods = session["methods"].items()
        facts |= {f"method {name}": str(about) for name, about in methods if name != PLAIN}
    versions = known["sessions"][-1]["versions"].items()
    return facts | {f"version of {name}": value for name, value in versions}


def identity_sections(run: BenchRun) -> list[Section]:
    """Report of `d3d bench identity`."""
    fixed = run.provenance["fixed"]
    text = (
        f"{fixed['target']}, {run.precision} on {fixed['device']}, "
        f"temperature {fixed['temperature']}: answers against plain decoding's."
    )
    table = tables.identity_table(figures_of(run.groups))
    return [Section("Identity", (text,), (table, *tables.divergence_tables(run.rows)))]


def identity_record(run: BenchRun) -> dict[str, Any]:
    """Record of `d3d bench identity`, as JSON values: counts by set and method, and each answer
    that differs from plain's. `mistakes` counts those of our own methods that rounding does not
    explain."""
    found = figures_of(run.groups)
    parted = [row for row in run.rows if row.identity is not None and not row.identity.identical]
    return {
        "settings": run.provenance["fixed"],
        "sets": run.provenance["sets"],
        "commands": [session["command"] for session in run.provenance["sessions"]],
        "mistakes": sum(
            row.identity is not None and not row.identity.is_rounding and row.method not in PEERS
            for row in parted
        ),
        "methods": [
            _counts(figures)
            for figures in found
            if figures.group.set_name != ALL_SETS and figures.identity is not None
        ],
        "divergences": [_divergence(row) for row in parted],
    }


def _counts(figures: GroupFigures) -> dict[str, Any]:
    assert figures.identity is not None
    counts = figures.identity._asdict()
    return {
        "set": figures.group.set_name,
        "method": figures.method,
        "setting": figures.group.setting.model_dump(),
        **{name: counts[name] for name in ("compared", "identical", "rounding", "other")},
        "tokens": figures.speed.completion_tokens,
    }


def _divergence(row: Row) -> dict[str, Any]:
    assert row.identity is not None
    asked = {"set_name", "method", "setting", "prompt_id", "turn"}
    return {
        **row.model_dump(by_alias=True, include=asked),
        "tokens": row.completion_tokens,
        **row.identity.model_dump(exclude={"identical"}),
    }
