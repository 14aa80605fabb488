"""Tables of what was modelled. Each of them says so."""

from __future__ import annotations

from collections.abc import Sequence

from d3d.lab.plan.check import TOLERANCE, Checked
from d3d.lab.plan.plan import Advice, Option
from d3d.lab.plan.published import CONTEXT, DRAFT_LENGTH, Explained
from d3d.lab.report.tables import Table, milliseconds, number, percent

MODELLED = "modelled"


def options_table(found: Sequence[Option], title: str) -> Table:
    """Modes beside each other, and where the time of each goes."""
    plain = found[0].modelled.tpot_s
    rows = []
    for option in found:
        one = option.modelled
        shares = (one.verify_s, one.draft_s, one.switch_s, one.rest_s)
        rows.append(
            (
                option.label,
                milliseconds(one.tpot_s, 2),
                number(plain / one.tpot_s),
                number(one.tokens_a_round),
                milliseconds(one.seconds / one.rounds, 2),
                *(percent(part / one.seconds) for part in shares),
                one.late if one.mode == "async" else None,
                option.note,
            )
        )
    headings = (
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
    note = (
        "All figures are modelled, none is measured. Draft: time in which the target waits for one. "
        "Late: rounds whose successors were not ready when they were wanted."
    )
    return Table(f"{title} ({MODELLED})", headings, tuple(rows), note)


def advice_table(found: Sequence[Advice]) -> Table:
    rows = tuple(
        (
            one.change,
            number(one.gain),
            _with(one.option),
            milliseconds(one.option.modelled.tpot_s, 2),
            one.proviso,
        )
        for one in found
    )
    note = (
        "Each by itself, against the best mode above. Fewer layers: as if acceptance stayed as it is; the condition says how far it may "
        "fall."
    )
    return Table(
        f"What to change ({MODELLED})",
        ("change", "times as fast", "with", "ms a token", "provided"),
        rows,
        note,
    )


def _with(option: Option) -> str:
    return f"{option.label}: {option.note}" if option.note else option.label


def published_table(found: Sequence[Explained], outcomes: int) -> Table:
    """The published speed-ups beside the model's."""
    rows = []
    for one in found:
        implied = None if one.published_round_s is None else one.published_round_s / one.plain_s
        rows.append(
            (
                one.claim.name,
                f"2 {one.device.name}",
                milliseconds(one.plain_s, 2),
                milliseconds(one.verify_s, 2),
                milliseconds(one.packed_s, 2),
                number(one.claim.acceptance_length),
                number(one.claim.speed_up),
                number(one.all_hits),
                number(one.no_hits),
                number(one.serial),
                number(implied),
                number(one.round_s / one.plain_s),
                number(one.hit_rate),
                number(one.needed_acceptance),
            )
        )
    headings = (
        "target, drafter",
        "devices",
        "plain ms",
        "verify ms",
        "packed ms",
        "accepted, published",
        "speed-up, published",
        "all hits",
        "no hits",
        "serial",
        "round, published",
        "round, all hits",
        "hit rate",
        "accepted, needed",
    )
    note = (
        f"Published: acceptance length and speed-up; all else is modelled, for drafts of {DRAFT_LENGTH}, {outcomes} outcomes and {CONTEXT} "
        "tokens of context in bfloat16. Accepted: acceptance length; needed: at which all hits would give the published speed-up. "
        "Rounds in plain steps. Hit rate: at which misses alone would explain the published round; above 1 it is shorter than the model's, "
        "below 0 misses are not enough."
    )
    return Table(f"Published speed-ups and the model ({MODELLED})", headings, tuple(rows), note)


def check_table(found: Sequence[Checked]) -> Table:
    rows = tuple(
        (
            one.source,
            one.mode,
            one.draft_length or None,
            one.tokens,
            milliseconds(one.predicted_s, 2),
            milliseconds(one.measured_s, 2),
            f"{100 * one.error:+.1f} %",
            "yes" if one.within else "no",
            one.fallbacks or None,
        )
        for one in found
    )
    within = sum(one.within for one in found)
    note = (
        "Predicted from the verdicts of the recorded rounds and the costs of passes, not from the recorded times. "
        f"{within} of {len(found)} within {TOLERANCE:.0%}. Rounds without a draft, in async mode: the worker did not answer in time; what "
        "they waited for nothing is not modelled."
    )
    headings = (
        "run",
        "mode",
        "draft length",
        "tokens",
        "ms a token, modelled",
        "ms a token, measured",
        "error",
        f"within {TOLERANCE:.0%}",
        "rounds without a draft",
    )
    return Table("The model against what was measured", headings, rows, note)
