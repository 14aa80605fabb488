"""Our figures beside the published ones of D3D, as the README shows them: made from the files of a
run, never by hand."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Any, NamedTuple

from d3d.errors import InvalidRequest
from d3d.lab.bench.methods import PEERS, PLAIN
from d3d.lab.bench.metrics import Group, drafting, sameness, speed, speed_up
from d3d.lab.bench.modelled import ASYNC_MODELLED, LABEL
from d3d.lab.bench.rows import Row
from d3d.lab.report.run import ALL_SETS, Run, best_plain_peer, plain_of, shape
from d3d.lab.report.tables import Cell, Table, markdown, number
from d3d.model.int8 import precision

BEGIN, END = "<!-- results:begin -->", "<!-- results:end -->"
"""What stands between these marks is replaced."""


class Published(NamedTuple):
    """Speed-up over plain decoding and tokens/s, Qwen3-8B with the drafter D3D-1.7B, one request,
    greedy, blocks of 16, SGLang on GPUs that the articles of November 2026 do not name."""

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

Groups = dict[Group, list[Row]]


def beside_published(run: Run) -> str:
    """Markdown: a table of sets, published and ours, and where ours come from. Only the run's first
    shape (most tokens, batch) counts."""
    groups = run.groups
    first = shape(next(iter(groups)))
    mine = {group: rows for group, rows in groups.items() if shape(group) == first}
    methods = [
        name
        for name in dict.fromkeys(group.method for group in mine)
        if name not in PEERS and name != PLAIN
    ]
    rows = tuple(
        _row(mine, name, methods)
        for name in PUBLISHED
        if any(group.set_name == name for group in mine)
    )
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
    return markdown(Table("Published and ours", headings, rows, note)) + "\n" + origin(run)


def _row(groups: Groups, name: str, methods: Sequence[str]) -> tuple[Cell, ...]:
    published = PUBLISHED[name]
    found = {group.method: group for group in groups if group.set_name == name}
    plain = found[PLAIN]
    ratios = {
        method: speed_up(groups[found[method]], plain_of(groups, plain))
        for method in methods
        if method in found
    }
    cells = tuple(
        None
        if (one := ratios.get(method)) is None
        else f"{one.ratio:.2f} [{one.low:.2f}, {one.high:.2f}]"
        for method in methods
    )
    drafts = drafting(groups[found["serial"]]) if "serial" in found else None
    peer = best_plain_peer(groups, plain)
    measured = [
        method for method in (PLAIN, *methods) if method in found and method != ASYNC_MODELLED
    ]
    over = [
        ratio.ratio
        for method in measured
        if peer and (ratio := speed_up(groups[found[method]], peer[1]))
    ]
    return (
        published.title,
        number(published.speed_up),
        number(published.tokens_per_s, 0),
        number(speed(groups[plain]).tokens_per_s, 1),
        *cells,
        number(drafts.acceptance_length) if drafts else None,
        peer[0] if peer else None,
        number(max(over)) if over else None,
    )


def summary(run: Run) -> str:
    """Markdown: speed, acceptance and identity by set and method, and where they come from. Of a
    machine that was busy no speed is told."""
    rows = []
    for group, answers in run.groups.items():
        plain, drafts, same = plain_of(run.groups, group), drafting(answers), sameness(answers)
        ratio = None if group.method == PLAIN or run.machine_was_busy else speed_up(answers, plain)
        rows.append(
            (
                group.set_name,
                group.label,
                len(answers),
                None if run.machine_was_busy else number(speed(answers).tokens_per_s, 1),
                None if ratio is None else f"{ratio.ratio:.2f} [{ratio.low:.2f}, {ratio.high:.2f}]",
                number(drafts.acceptance_length) if drafts else None,
                f"{same.identical}/{same.compared}" if same else None,
            )
        )
    headings = ("set", "method", "answers", "tokens/s", "over plain", "tokens a round", "identical")
    return (
        markdown(
            Table(str(run.provenance["fixed"]["target"]).rpartition("/")[2], headings, tuple(rows))
        )
        + "\n"
        + origin(run)
    )


def identity_line(record: dict[str, Any]) -> str:
    """One sentence about the record of `d3d bench identity`."""
    compared, identical, rounding = (
        sum(one[name] for one in record["methods"])
        for name in ("compared", "identical", "rounding")
    )
    names = ", ".join(dict.fromkeys(one["method"] for one in record["methods"]))
    sets = len({one["set"] for one in record["methods"]})
    kind = precision(record["settings"]["dtype"], record["settings"].get("quantize"))
    text = f"{kind}: {identical} of {compared} answers of {names} over {sets} sets have plain decoding's ids"
    parted = (
        f", {rounding} part at a near-tie, {record['mistakes']} elsewhere"
        if compared > identical
        else ""
    )
    commands = ", then ".join(
        dict.fromkeys(f"`{command_line(command)}`" for command in record["commands"])
    )
    return f"**Identity**, {text}{parted} ({commands}).\n"


def origin(run: Run) -> str:
    """The commands, the machine and the day, and whether the times are to be doubted."""
    fixed, sessions = run.provenance["fixed"], run.provenance["sessions"]
    commands = "; ".join(
        dict.fromkeys(f"`{command_line(session['command'])}`" for session in sessions)
    )
    machine, versions = sessions[0]["machine"], sessions[0]["versions"]
    where = f"{machine['cores']} cores of {machine['processor']}, {machine['threads']} threads, torch {versions['torch']}"
    doubt = (
        "**Provisional: the machine was at work meanwhile, so times mean little.** "
        if run.machine_was_busy
        else ""
    )
    kind = precision(fixed["dtype"], fixed.get("quantize"))
    about = f"{fixed['target']} in {kind} on {fixed['device']}; {where}; {sessions[0]['date'][:10]}"
    return f"{doubt}{about}. Made by {commands}.\n"


def command_line(command: Sequence[str]) -> str:
    """As it may be typed anywhere: directories of data and of models are the reader's own."""
    return shlex.join(command)


def replaced(text: str, block: str) -> str:
    """`text` with `block` between the marks. Raises InvalidRequest where they are not there."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise InvalidRequest(f"the marks {BEGIN} and {END} are not both there, in this order")
    return f"{before}{BEGIN}\n\n{block.strip()}\n\n{END}{after}"
