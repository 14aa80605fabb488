"""Does what a preset was tuned on still hold for recent traffic?

Acceptance length, tokens committed a round, is what tuning rests on that traffic changes: times of
passes belong to the machine. So the recorded rounds of requests that decoded as the preset says are
compared with the rounds that it was judged by, answer by answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from d3d.decoding.modes import ModeOptions
from d3d.errors import InvalidRequest
from d3d.hub.presets import PresetFile, Tuned
from d3d.lab.stats import Interval, unpaired_ratio
from d3d.lab.tune.traffic import Record

FEWEST_ANSWERS = 20
"""Fewer answers with rounds, of traffic, say nothing certain."""
TUNE_SHARE = 0.05
"""A change of acceptance length by more than this share moves the best draft length."""
TRAIN_SHARE = 0.20
"""A fall by more than this is not mended by another draft length: the drafter does not know what it
is asked."""

Advice = Literal["keep", "record", "tune", "train"]


class Comparison(NamedTuple):
    """Recent traffic beside what the preset was tuned on."""

    advice: Advice
    reason: str
    compared: int
    """Requests that decoded as the preset says, and had a round."""
    left_out: dict[str, int]
    """Other requests, by why they were."""
    tuned_length: float
    """Acceptance length while tuning."""
    recent_length: float | None
    change: Interval | None
    """Recent over tuned, with its 95 % interval."""
    expected_speed_up: Interval | None
    """Over plain decoding, if passes take what they took then."""
    kinds: dict[str, float]
    """Acceptance length by kind of prompt."""

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        fields = self._asdict()
        return fields | {
            name: value and list(value)
            for name, value in fields.items()
            if isinstance(value, Interval)
        }


def calibrate(preset: PresetFile, records: Sequence[Record], *, seed: int = 0) -> Comparison:
    """Raises InvalidRequest for a preset that was not tuned, or decodes plainly."""
    tuned = preset.tuned
    if tuned is None:
        raise InvalidRequest(
            "the preset was not tuned, so there is nothing to compare with; d3d tune writes one that was"
        )
    if preset.mode == "plain" or not tuned.answers:
        raise InvalidRequest(
            "the preset decodes plainly, so traffic can't change its acceptance; d3d tune tells whether drafting pays now"
        )
    left_out: dict[str, int] = {}
    fitting: list[Record] = []
    for record in records:
        if (why := _differs(record, preset, tuned)) is None:
            fitting.append(record)
        else:
            left_out[why] = left_out.get(why, 0) + 1
    old = [(float(one.committed), float(one.rounds)) for one in tuned.answers]
    new = [(float(record.committed), float(len(record.rounds))) for record in fitting]
    change = unpaired_ratio(new, old, seed=seed) if new else None
    advice, reason = _advice(change, len(fitting), tuned)
    speed_up = None if change is None else Interval(*(tuned.speed_up * share for share in change))
    kinds: dict[str, float] = {
        kind: _length([one for one in fitting if one.kind == kind])
        for kind in dict.fromkeys(one.kind for one in fitting)
    }
    return Comparison(
        advice,
        reason,
        len(fitting),
        left_out,
        sum(committed for committed, _ in old) / sum(rounds for _, rounds in old),
        _length(fitting) if fitting else None,
        change,
        speed_up,
        kinds,
    )


def _differs(record: Record, preset: PresetFile, tuned: Tuned) -> str | None:
    """Why a request's rounds can't be compared; None where they can."""
    if record.target != tuned.target_fingerprint:
        return "another target"
    if record.quantize != preset.quantize:
        return f"{record.quantize or 'unrounded'} weights"
    if record.mode != preset.mode:
        return f"mode {record.mode}"
    if record.drafter != tuned.drafter_fingerprint:
        return "another drafter"
    options = _asking(preset.model_dump(include=set(ModeOptions._fields), exclude_none=True))
    recorded = _asking(record.options)
    if {name: recorded.get(name) for name in options} != options or (
        set(recorded) - set(options) - {"draft_length"}
    ):
        return "other options of its mode"
    return None if record.rounds else "no round"


def _asking(options: dict[str, Any]) -> dict[str, Any]:
    """Without those whose 0 asks for nothing."""
    return {
        name: value
        for name, value in options.items()
        if value or name not in ("lookup", "least_kept")
    }


def _advice(change: Interval | None, answers: int, tuned: Tuned) -> tuple[Advice, str]:
    if change is None or answers < FEWEST_ANSWERS:
        return (
            "record",
            f"{answers} requests that decoded as the preset says are too few to tell; record {FEWEST_ANSWERS} or more",
        )
    if change.high < 1 - TRAIN_SHARE:
        return "train", (
            f"acceptance has fallen by more than {TRAIN_SHARE:.0%}: train a drafter on answers to such prompts (d3d data, d3d train), then "
            "tune again"
        )
    if tuned.speed_up * change.high < 1:
        return (
            "tune",
            "drafting is now slower than plain decoding, if passes take what they took: tune again",
        )
    if change.high < 1 - TUNE_SHARE:
        return (
            "tune",
            f"acceptance has fallen by more than {TUNE_SHARE:.0%}: a shorter draft, or another mode, may be faster; tune again",
        )
    if change.low > 1 + TUNE_SHARE:
        return (
            "tune",
            f"acceptance has risen by more than {TUNE_SHARE:.0%}: longer drafts may pay; tune again",
        )
    if change.low < 1 - TUNE_SHARE or change.high > 1 + TUNE_SHARE:
        return (
            "record",
            f"the interval is too wide to tell a change of {TUNE_SHARE:.0%}; record more requests",
        )
    return "keep", "the preset was tuned on traffic like this"


def _length(records: Sequence[Record]) -> float:
    return sum(record.committed for record in records) / sum(
        len(record.rounds) for record in records
    )
