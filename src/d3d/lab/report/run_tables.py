"""The tables of a benchmark report."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median
from typing import Any, TypeVar

from d3d.lab.bench.answers import PLAIN
from d3d.lab.bench.metrics import SpeedUp, score_counts
from d3d.lab.bench.results import BenchRun
from d3d.lab.bench.rows import Row
from d3d.lab.report.figures import GroupFigures
from d3d.lab.report.tables import Cell, Table, gibibytes, milliseconds, number, percent, tabulate

T = TypeVar("T")
Figures = Sequence[GroupFigures]

MACHINE = ("processor", "cores", "threads", "gpus", "load_at_start")
COLUMNS = ("set", "method", "max tokens", "batch")


def group_table(
    title: str,
    parts: Iterable[tuple[GroupFigures, T | None]],
    columns: Mapping[str, Callable[[T], Cell]],
    note: str,
) -> Table:
    """A row for each group with its part, None left out."""
    rows = []
    for figures, part in parts:
        if part is not None:
            group = figures.group
            names = group.set_name, group.label, group.setting.max_tokens, group.setting.batch
            rows.append((*names, *(cell(part) for cell in columns.values())))
    return Table(title, (*COLUMNS, *columns), tuple(rows), note)


def ratio_text(ratio: SpeedUp | None) -> str | None:
    if ratio is None:
        return None
    value, low, high = ratio.interval
    return f"{value:.2f} [{low:.2f}, {high:.2f}]"


def summary_table(found: Figures) -> Table:
    """The most important figures."""
    return group_table(
        "In short",
        [(figures, figures) for figures in found],
        {
            "tokens/s": lambda figures: number(figures.speed.tokens_per_s, 1),
            "over plain": lambda figures: ratio_text(figures.over_plain),
            "over best peer": lambda figures: _value(figures.over_peer),
            "acceptance length": lambda figures: number(figures.acceptance_length),
            "identical": lambda figures: figures.identical,
        },
        "The tables below have the details, and say what each figure means.",
    )


def _value(ratio: SpeedUp | None) -> str | None:
    return None if ratio is None else number(ratio.interval.value)


def speed_table(found: Figures) -> Table:
    return group_table(
        "Speed",
        [(figures, figures.speed) for figures in found],
        {
            "answers": lambda speed: speed.answers,
            "tokens": lambda speed: speed.completion_tokens,
            "tokens/s": lambda speed: number(speed.tokens_per_s, 1),
            "ttft ms": lambda speed: milliseconds(speed.ttft_s),
            "tpot ms": lambda speed: milliseconds(speed.tpot_s, 2),
            "itl p50 ms": lambda speed: milliseconds(speed.itl_s_p50),
            "itl p99 ms": lambda speed: milliseconds(speed.itl_s_p99),
            "tokens a delivery": lambda speed: number(speed.tokens_per_delivery),
            "peak GiB": lambda speed: gibibytes(speed.peak_memory_bytes),
        },
        "tokens/s: all answer tokens over all their time, prompts included. tpot: time per token "
        "after the first, ratio of totals. itl: gaps between deliveries; a round's tokens arrive "
        "together. Peak memory on a CPU is that of the whole process, with all its models.",
    )


def speed_up_table(found: Figures) -> Table:
    shown = [figures for figures in found if figures.method != PLAIN or figures.peer is not None]
    return group_table(
        "Speed-up",
        [(figures, figures) for figures in shown],
        {
            "over plain": lambda figures: ratio_text(figures.over_plain),
            "per prompt: least / median / most": lambda figures: _spread(figures.over_plain),
            "best plain peer": lambda figures: figures.peer[0] if figures.peer else None,
            "over that peer": lambda figures: ratio_text(figures.over_peer),
        },
        "How many times as fast, by seconds per token after the first: ratio of totals, with a "
        "95 % bootstrap interval over prompts. Plain is our own engine without a drafter; if a "
        "peer's plain decoding is faster, compare with that.",
    )


def _spread(ratio: SpeedUp | None) -> str | None:
    each = ratio.per_prompt if ratio else ()
    return f"{each[0]:.2f} / {median(each):.2f} / {each[-1]:.2f}" if each else None


def acceptance_table(found: Figures) -> Table:
    return group_table(
        "Acceptance",
        [(figures, figures.rounds) for figures in found],
        {
            "rounds": lambda rounds: rounds.rounds,
            "acceptance length": lambda rounds: number(rounds.acceptance_length),
            "macro": lambda rounds: number(rounds.acceptance_length_macro),
            "accepted": lambda rounds: number(rounds.accepted_per_round),
            "acceptance rate": lambda rounds: percent(rounds.acceptance_rate),
            "acceptance at 1, 2, ...": lambda rounds: " ".join(
                f"{share:.2f}" for share in rounds.acceptance_at
            ),
            "rounds by accepted 0, 1, ...": lambda rounds: " ".join(map(str, rounds.histogram)),
            "draft": lambda rounds: percent(rounds.t_draft_share),
            "verify": lambda rounds: percent(rounds.t_verify_share),
            "draft ms": lambda rounds: milliseconds(rounds.t_draft_s),
            "verify ms": lambda rounds: milliseconds(rounds.t_verify_s),
            "hit rate": lambda rounds: percent(rounds.hit_rate),
        },
        "Acceptance length: tokens committed per round, bonus token included; macro: mean of the "
        "answers' own. Accepted: drafted tokens kept per round. Rate: share of drafted tokens that "
        "were kept. Draft and verify: share of the time from first to last token, and mean per "
        "round; in async mode, draft is the exposed draft time. Hit rate: share of wanted "
        "successors that were ready.",
    )


def identity_table(found: Figures) -> Table:
    return group_table(
        "Identity",
        [(figures, figures.identity) for figures in found],
        {
            "compared": lambda counts: counts.compared,
            "identical": lambda counts: counts.identical,
            "rounding": lambda counts: counts.rounding,
            "other": lambda counts: counts.other,
            "by": lambda counts: counts.by,
            "end in a loop": lambda counts: counts.repeats,
        },
        "Compared with plain decoding of the same prompt. Rounding: the first difference is a "
        "near-tie. Other: a bug in our own methods; expected of peers whose arithmetic differs.",
    )


def divergence_tables(rows: Sequence[Row], limit: int = 50) -> tuple[Table, ...]:
    """The first `limit` answers with known ids that are not plain's; no table if there are none."""
    parted = [
        (row, row.identity)
        for row in rows
        if row.identity is not None and not row.identity.identical and row.identity.by == "ids"
    ]
    rest = f" The first {limit} are shown." if len(parted) > limit else ""
    table = tabulate(
        "Answers that part from plain's",
        parted[:limit],
        {
            "set": lambda pair: pair[0].set_name,
            "method": lambda pair: pair[0].method,
            "prompt": lambda pair: f"{pair[0].prompt_id}, turn {pair[0].turn + 1}",
            "tokens / plain's": lambda pair: (
                f"{pair[0].completion_tokens} / {pair[1].plain_tokens}"
            ),
            "first difference": lambda pair: pair[1].position,
            "gap": lambda pair: None if pair[1].gap is None else f"{pair[1].gap:.1e}",
            "kind": lambda pair: "rounding" if pair[1].is_rounding else "other",
        },
        f"{len(parted)} in all.{rest}",
    )
    return (table,) if parted else ()


def score_tables(found: Figures) -> tuple[Table, ...]:
    """No table if nothing was scored."""
    table = group_table(
        "Right answers",
        [(figures, scores) for figures in found if (scores := score_counts(figures.rows))[1]],
        {
            "scored": lambda scores: scores[1],
            "right": lambda scores: scores[0],
            "share": lambda scores: percent(scores[0] / scores[1]),
        },
        "Simple graders, not the sets' official ones; answers cut off at the longest length count "
        "as wrong.",
    )
    return (table,) if table.rows else ()


def provenance_tables(run: BenchRun) -> tuple[Table, ...]:
    """Settings, sets, methods, and the commands with their versions and machines."""
    known = run.provenance
    methods: dict[str, Any] = {}
    for session in known["sessions"]:
        methods |= session["methods"]
    sessions = [
        (
            session["date"],
            " ".join(session["command"]),
            _text(session["versions"]),
            _text({name: session["machine"][name] for name in MACHINE}),
        )
        for session in known["sessions"]
    ]
    sets = [
        (name, about["title"], about["asked"], about["available"], about["sha256"][:12])
        for name, about in known["sets"].items()
    ]
    fixed = [(name, _text(value)) for name, value in known["fixed"].items()]
    described = [(name, _text(about)) for name, about in methods.items()]
    runs = ("date", "command", "versions", "machine")
    return (
        Table("Settings", ("setting", "value"), tuple(fixed)),
        Table("Sets", ("set", "title", "asked", "has", "sha256"), tuple(sets)),
        Table("Methods", ("method", "what it is"), tuple(described)),
        Table("Runs of the command", runs, tuple(sessions)),
    )


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_text(part)}" for name, part in value.items()) or "-"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
