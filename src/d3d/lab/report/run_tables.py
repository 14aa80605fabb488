"""The tables of a benchmark report."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from d3d.lab.bench.methods import PLAIN
from d3d.lab.bench.metrics import Group, Ratio, drafting, sameness, score_share, speed, speed_up
from d3d.lab.bench.rows import Row
from d3d.lab.report.run import Run, best_plain_peer, plain_of
from d3d.lab.report.tables import Cell, Table, gibibytes, milliseconds, number, percent

Groups = dict[Group, list[Row]]

COLUMNS = ("set", "method", "max tokens", "batch")


def _names(group: Group) -> tuple[Cell, ...]:
    return (group.set_name, group.label, group.setting.max_tokens, group.setting.batch)


def ratio_text(ratio: Ratio | None) -> str | None:
    return None if ratio is None else f"{ratio.ratio:.2f} [{ratio.low:.2f}, {ratio.high:.2f}]"


def summary_table(groups: Groups) -> Table:
    """The few figures that are asked for first."""
    rows = []
    for group, answers in groups.items():
        plain, peer, drafts, same = (
            plain_of(groups, group),
            best_plain_peer(groups, group),
            drafting(answers),
            sameness(answers),
        )
        over_peer = None if peer is None or peer[0] == group.method else speed_up(answers, peer[1])
        rows.append(
            (
                *_names(group),
                number(speed(answers).tokens_per_s, 1),
                None if group.method == PLAIN else ratio_text(speed_up(answers, plain)),
                number(over_peer.ratio) if over_peer else None,
                number(drafts.acceptance_length) if drafts else None,
                f"{same.identical}/{same.compared}" if same else None,
            )
        )
    headings = ("tokens/s", "over plain", "over best peer", "acceptance length", "identical")
    return Table(
        "In short",
        (*COLUMNS, *headings),
        tuple(rows),
        "The tables below have the details, and say what each figure means.",
    )


def speed_table(groups: Groups) -> Table:
    rows = []
    for group, answers in groups.items():
        one = speed(answers)
        rows.append(
            (
                *_names(group),
                one.answers,
                one.completion_tokens,
                number(one.tokens_per_s, 1),
                milliseconds(one.ttft_s),
                milliseconds(one.tpot_s, 2),
                milliseconds(one.itl_s_p50),
                milliseconds(one.itl_s_p99),
                number(one.tokens_per_delivery),
                gibibytes(one.peak_memory_bytes),
            )
        )
    headings = (
        "answers",
        "tokens",
        "tokens/s",
        "ttft ms",
        "tpot ms",
        "itl p50 ms",
        "itl p99 ms",
        "tokens a delivery",
        "peak GiB",
    )
    note = (
        "tokens/s: all answer tokens over all their time, prompts included. tpot: time per token after the first, ratio of totals. "
        "itl: gaps between deliveries; a round's tokens come together. Peak memory on a CPU is the whole process's, with every model "
        "that is open in it."
    )
    return Table("Speed", (*COLUMNS, *headings), tuple(rows), note)


def speed_up_table(groups: Groups) -> Table:
    rows = []
    for group, answers in groups.items():
        if group.method == PLAIN and best_plain_peer(groups, group) is None:
            continue
        ours = None if group.method == PLAIN else speed_up(answers, plain_of(groups, group))
        peer = best_plain_peer(groups, group)
        theirs = None if peer is None or peer[0] == group.method else speed_up(answers, peer[1])
        each = ours.per_prompt if ours else ()
        spread = f"{each[0]:.2f} / {median(each):.2f} / {each[-1]:.2f}" if each else None
        rows.append(
            (
                *_names(group),
                ratio_text(ours),
                spread,
                peer[0] if peer else None,
                ratio_text(theirs),
            )
        )
    headings = (
        "over plain",
        "per prompt: least / median / most",
        "best plain peer",
        "over that peer",
    )
    note = (
        "How many times as fast, by seconds per token after the first: ratio of totals, with the 95 % interval that drawing the prompts "
        "anew gives. Plain is our own engine without a drafter; a peer's plain decoding may be faster, and then that is what counts."
    )
    return Table("Speed-up", (*COLUMNS, *headings), tuple(rows), note)


def acceptance_table(groups: Groups) -> Table:
    rows = []
    for group, answers in groups.items():
        found = drafting(answers)
        if found is None:
            continue
        rows.append(
            (
                *_names(group),
                found.rounds,
                number(found.acceptance_length),
                number(found.acceptance_length_macro),
                number(found.accepted_per_round),
                percent(found.acceptance_rate),
                " ".join(f"{share:.2f}" for share in found.acceptance_at),
                " ".join(map(str, found.histogram)),
                percent(found.t_draft_share),
                percent(found.t_verify_share),
                milliseconds(found.t_draft_s),
                milliseconds(found.t_verify_s),
                percent(found.hit_rate),
            )
        )
    headings = (
        "rounds",
        "acceptance length",
        "macro",
        "accepted",
        "acceptance rate",
        "acceptance at 1, 2, ...",
        "rounds by accepted 0, 1, ...",
    )
    times = ("draft", "verify", "draft ms", "verify ms", "hit rate")
    note = (
        "Acceptance length: tokens committed by rounds over rounds, the target's own token of each round included; macro: mean of the "
        "answers' own. Accepted: drafted tokens kept a round, without that one. Rate: kept over really drafted tokens. "
        "Draft and verify: share of the time from first to last token, and mean of a "
        "round; in async mode draft is what nothing hides, and hit rate the share of wanted successors that were ready."
    )
    return Table("Acceptance", (*COLUMNS, *headings, *times), tuple(rows), note)


def identity_table(groups: Groups) -> Table:
    rows = []
    for group, answers in groups.items():
        found = sameness(answers)
        if found is not None:
            repeats = sum(row.repeats for row in answers)
            rows.append(
                (
                    *_names(group),
                    found.compared,
                    found.identical,
                    found.rounding,
                    found.other,
                    found.by,
                    repeats,
                )
            )
    headings = ("compared", "identical", "rounding", "other", "by", "end in a loop")
    note = (
        "Against plain decoding of the same prompt. Rounding: the first difference lies where the target was undecided. Other is a "
        "mistake for methods of ours; peers that compute otherwise may differ anywhere."
    )
    return Table("Identity", (*COLUMNS, *headings), tuple(rows), note)


def divergence_table(rows: Sequence[Row], limit: int = 50) -> Table:
    """Every answer of known ids that is not plain's, the first `limit` of them."""
    found = [
        row
        for row in rows
        if row.identity is not None and not row.identity.identical and row.identity.by == "ids"
    ]
    cells = [
        (
            row.set_name,
            row.method,
            f"{row.prompt_id}, turn {row.turn + 1}",
            f"{row.completion_tokens} / {row.identity.plain_tokens}",
            row.identity.position,
            None if row.identity.gap is None else f"{row.identity.gap:.1e}",
            "rounding" if row.identity.is_rounding else "other",
        )
        for row in found[:limit]
        if row.identity is not None
    ]
    note = f"{len(found)} in all." + (
        f" The first {limit} are shown." if len(found) > limit else ""
    )
    headings = ("set", "method", "prompt", "tokens / plain's", "first difference", "gap", "kind")
    return Table("Answers that part from plain's", headings, tuple(cells), note)


def score_table(groups: Groups) -> Table:
    rows = []
    for group, answers in groups.items():
        right, scored = score_share(answers)
        if scored:
            rows.append((*_names(group), scored, right, percent(right / scored)))
    note = "Simple graders, not the sets' official ones; answers that were cut at the most tokens count as wrong."
    return Table("Right answers", (*COLUMNS, "scored", "right", "share"), tuple(rows), note)


def provenance_tables(run: Run) -> tuple[Table, ...]:
    """What was run, on what, by which command."""
    known = run.provenance
    fixed = tuple((name, _text(value)) for name, value in known["fixed"].items())
    sets = tuple(
        (name, about["title"], about["asked"], about["available"], about["sha256"][:12])
        for name, about in known["sets"].items()
    )
    methods: dict[str, Any] = {}
    for session in known["sessions"]:
        methods |= session["methods"]
    sessions = tuple(
        (
            session["date"],
            " ".join(session["command"]),
            _text(session["versions"]),
            _text(
                {
                    name: session["machine"][name]
                    for name in ("processor", "cores", "threads", "gpus", "load_at_start")
                }
            ),
        )
        for session in known["sessions"]
    )
    return (
        Table("Settings", ("setting", "value"), fixed),
        Table("Sets", ("set", "title", "asked", "has", "sha256"), sets),
        Table(
            "Methods",
            ("method", "what it is"),
            tuple((name, _text(about)) for name, about in methods.items()),
        ),
        Table("Runs of the command", ("date", "command", "versions", "machine"), sessions),
    )


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_text(part)}" for name, part in value.items()) or "-"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
