"""Our figures beside the published ones of D3D, made from the files of a run for the README."""

from __future__ import annotations

import shlex
from typing import Any, NamedTuple

from d3d.errors import InvalidRequest
from d3d.lab.bench.answers import PLAIN
from d3d.lab.bench.methods import PEERS
from d3d.lab.bench.own import ASYNC_MODELLED, LABEL
from d3d.lab.bench.results import ALL_SETS, BenchRun
from d3d.lab.report.figures import GroupFigures, figures_of
from d3d.lab.report.run_tables import ratio_text
from d3d.lab.report.tables import Cell, Table, markdown, number, tabulate
from d3d.model.int8 import precision

BEGIN, END = "<!-- results:begin -->", "<!-- results:end -->"
"""The text between these marks is replaced."""


class Published(NamedTuple):
    """Speed-up over plain decoding and tokens/s: Qwen3-8B with the drafter D3D-1.7B, one request,
    greedy, blocks of 16, SGLang, on GPUs that the articles of November 2026 do not name."""

    title: str
    speed_up: float
    tokens_per_s: float


PUBLISHED = {
    "gsm8k": Published("GSM8K", 4.876, 658.10),
    "math500": Published("MATH-500", 4.243, 572.66),
    "aime25": Published("AIME25", 2.924, 394.56),
    "humaneval": Published("HumanEval", 3.550, 479.15),
    "mbpp": Published("MBPP", 3.174, 428.39),
    "livecodebench": Published("LiveCodeBench v6", 1.982, 267.42),
    "mt_bench": Published("MT-Bench", 1.916, 258.54),
    ALL_SETS: Published("all", 3.717, 501.60),
}


def beside_published(run: BenchRun) -> str:
    """Markdown: a table of sets with published figures and ours, and the origin of ours. Only the
    answer length and batch of the run's first rows count."""
    groups = run.groups
    first = next(iter(groups)).setting.plain
    found = figures_of(
        {group: rows for group, rows in groups.items() if group.setting.plain == first}
    )
    by_set: dict[str, dict[str, GroupFigures]] = {}
    for figures in found:
        by_set.setdefault(figures.group.set_name, {})[figures.method] = figures
    names = dict.fromkeys(figures.method for figures in found)
    methods = [name for name in names if name not in PEERS and name != PLAIN]
    headings = (
        "set",
        "published: speed-up",
        "tokens/s",
        "ours: plain, tokens/s",
        *methods,
        "tokens a round, serial",
        "best plain peer",
        "best of ours over it",
    )
    note = (
        "Speed-up over plain decoding in the same engine, ratio of totals with its 95 % interval; "
        f"at most {first.max_tokens} tokens, batch {first.batch}."
    )
    if ASYNC_MODELLED in methods:
        note = f"{note} {LABEL}"
    rows = tuple(_row(name, by_set[name], methods) for name in PUBLISHED if name in by_set)
    return markdown(Table("Published and ours", headings, rows, note)) + "\n" + origin(run)


def _row(name: str, found: dict[str, GroupFigures], methods: list[str]) -> tuple[Cell, ...]:
    published, plain = PUBLISHED[name], found[PLAIN]
    ratios = (
        ratio_text(found[method].over_plain) if method in found else None for method in methods
    )
    measured = [
        found[method]
        for method in (PLAIN, *methods)
        if method in found and method != ASYNC_MODELLED
    ]
    over = [figures.over_peer.interval.value for figures in measured if figures.over_peer]
    return (
        published.title,
        number(published.speed_up),
        number(published.tokens_per_s, 0),
        number(plain.speed.tokens_per_s, 1),
        *ratios,
        number(found["serial"].acceptance_length) if "serial" in found else None,
        plain.peer[0] if plain.peer else None,
        number(max(over)) if over else None,
    )


def summary(run: BenchRun) -> str:
    """Markdown: speed, acceptance and identity by set and method, and their origin; no speeds if
    the machine was busy."""
    busy = run.machine_was_busy
    table = tabulate(
        str(run.provenance["fixed"]["target"]).rpartition("/")[2],
        figures_of(run.groups),
        {
            "set": lambda figures: figures.group.set_name,
            "method": lambda figures: figures.group.label,
            "answers": lambda figures: len(figures.rows),
            "tokens/s": lambda figures: None if busy else number(figures.speed.tokens_per_s, 1),
            "over plain": lambda figures: None if busy else ratio_text(figures.over_plain),
            "tokens a round": lambda figures: number(figures.acceptance_length),
            "identical": lambda figures: figures.identical,
        },
    )
    return markdown(table) + "\n" + origin(run)


def identity_line(record: dict[str, Any]) -> str:
    """One sentence about the record of `d3d bench identity`."""
    methods = record["methods"]
    compared, identical, rounding = (
        sum(counts[name] for counts in methods) for name in ("compared", "identical", "rounding")
    )
    names = ", ".join(dict.fromkeys(counts["method"] for counts in methods))
    sets = len({counts["set"] for counts in methods})
    kind = precision(record["settings"]["dtype"], record["settings"].get("quantize"))
    text = (
        f"{kind}: {identical} of {compared} answers of {names} over {sets} sets have plain "
        "decoding's ids"
    )
    if compared > identical:
        text += f", {rounding} part at a near-tie, {record['mistakes']} elsewhere"
    commands = dict.fromkeys(f"`{shlex.join(command)}`" for command in record["commands"])
    return f"**Identity**, {text} ({', then '.join(commands)}).\n"


def origin(run: BenchRun) -> str:
    """Commands, machine and date, and a warning if the machine was busy."""
    fixed, sessions = run.provenance["fixed"], run.provenance["sessions"]
    commands = dict.fromkeys(f"`{shlex.join(session['command'])}`" for session in sessions)
    machine, versions = sessions[0]["machine"], sessions[0]["versions"]
    doubt = ""
    if run.machine_was_busy:
        doubt = "**Provisional: the machine was at work meanwhile, so times mean little.** "
    return (
        f"{doubt}{fixed['target']} in {run.precision} on {fixed['device']}; "
        f"{machine['cores']} cores of {machine['processor']}, {machine['threads']} threads, "
        f"torch {versions['torch']}; {sessions[0]['date'][:10]}. Made by {'; '.join(commands)}.\n"
    )


def replaced(text: str, block: str) -> str:
    """`text` with `block` between the marks. Raises InvalidRequest if they are missing."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise InvalidRequest(f"the marks {BEGIN} and {END} are not both there, in this order")
    return f"{before}{BEGIN}\n\n{block.strip()}\n\n{END}{after}"
