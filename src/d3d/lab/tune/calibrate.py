"""Does a preset still suit recent traffic?

Of what tuning rests on, traffic changes only the acceptance length: times of passes belong to the
machine. So the recorded rounds of requests that decoded as the preset says are compared with the
rounds it was judged by, answer by answer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from d3d.config import OFF
from d3d.engine.metrics import ratio
from d3d.errors import InvalidRequest
from d3d.hub.presets import PresetFile, Tuned
from d3d.lab.stats import Interval, unpaired_ratio
from d3d.lab.tune.traffic import Record

FEWEST_ANSWERS = 20
"""Fewer answers with rounds are no basis for advice."""
TUNE_SHARE = 0.05
"""A larger change of acceptance length moves the best draft length."""
TRAIN_SHARE = 0.20
"""After a larger fall another draft length does not help: the drafter does not know such
prompts."""

Advised = Literal["keep", "record", "tune", "train"]


class Comparison(NamedTuple):
    """Recent traffic beside the traffic a preset was tuned on."""

    advice: Advised
    reason: str
    compared: int
    """Requests that decoded as the preset says, and had a round."""
    left_out: dict[str, int]
    """Other requests, by reason."""
    tuned_length: float
    """Acceptance length while tuning."""
    recent_length: float | None
    change: Interval | None
    """Recent over tuned, with its 95 % interval."""
    expected_speed_up: Interval | None
    """Over plain decoding, if passes take as long as they took then."""
    kinds: dict[str, float]
    """Acceptance length by kind of prompt."""

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        fields = self._asdict()
        intervals = {name: each for name, each in fields.items() if isinstance(each, Interval)}
        return fields | {name: list(interval) for name, interval in intervals.items()}


def calibrate(preset: PresetFile, records: Sequence[Record], *, seed: int = 0) -> Comparison:
    """Raises InvalidRequest for a preset that was not tuned, or decodes plainly."""
    tuned = preset.tuned
    if tuned is None:
        raise InvalidRequest(
            "the preset was not tuned, so there is nothing to compare with; d3d tune writes one "
            "that was"
        )
    if preset.mode == "plain" or not tuned.answers:
        raise InvalidRequest(
            "the preset decodes plainly, so traffic can't change its acceptance; d3d tune tells "
            "whether drafting pays now"
        )
    reasons = [_difference(record, preset, tuned) for record in records]
    fitting = [record for record, why in zip(records, reasons, strict=True) if why is None]
    old = [(float(answer.committed), float(answer.rounds)) for answer in tuned.answers]
    change = unpaired_ratio(_totals(fitting), old, seed=seed) if fitting else None
    advice, reason = _advice(change, len(fitting), tuned)
    return Comparison(
        advice,
        reason,
        len(fitting),
        dict(Counter(why for why in reasons if why is not None)),
        _length(old),
        _length(_totals(fitting)) if fitting else None,
        change,
        None if change is None else Interval(*(tuned.speed_up * share for share in change)),
        {
            kind: _length(_totals([record for record in fitting if record.kind == kind]))
            for kind in dict.fromkeys(record.kind for record in fitting)
        },
    )


def _totals(records: Sequence[Record]) -> list[tuple[float, float]]:
    """Tokens committed and rounds, by answer."""
    return [(float(record.committed), float(len(record.rounds))) for record in records]


def _length(totals: Sequence[tuple[float, float]]) -> float:
    """The acceptance length."""
    committed, rounds = map(sum, zip(*totals, strict=True))
    return ratio(committed, rounds)


def _difference(record: Record, preset: PresetFile, tuned: Tuned) -> str | None:
    """Why a request's rounds can't be compared; None if they can."""
    if record.target != tuned.target_fingerprint:
        return "another target"
    if record.quantize != preset.quantize:
        return f"{record.quantize or 'unrounded'} weights"
    if record.mode != preset.mode:
        return f"mode {record.mode}"
    if record.drafter != tuned.drafter_fingerprint:
        return "another drafter"
    options = _effective(preset.options)
    recorded = _effective(record.options)
    further = set(recorded) - set(options) - {"draft_length"}
    if further or any(recorded.get(name) != value for name, value in options.items()):
        return "other options of its mode"
    return None if record.rounds else "no round"


def _effective(options: dict[str, Any]) -> dict[str, Any]:
    """Without options that have no effect."""
    return {
        name: value
        for name, value in options.items()
        if value is not None and not (name in OFF and value == OFF[name])
    }


def _advice(change: Interval | None, answers: int, tuned: Tuned) -> tuple[Advised, str]:
    if change is None or answers < FEWEST_ANSWERS:
        return "record", (
            f"{answers} requests that decoded as the preset says are too few to tell; record "
            f"{FEWEST_ANSWERS} or more"
        )
    if change.high < 1 - TRAIN_SHARE:
        return "train", (
            f"acceptance has fallen by more than {TRAIN_SHARE:.0%}: train a drafter on answers to "
            "such prompts (d3d data, d3d train), then tune again"
        )
    if tuned.speed_up * change.high < 1:
        return "tune", (
            "drafting is now slower than plain decoding, if passes take as long as they took: "
            "tune again"
        )
    if change.high < 1 - TUNE_SHARE:
        return "tune", (
            f"acceptance has fallen by more than {TUNE_SHARE:.0%}: a shorter draft, or another "
            "mode, may be faster; tune again"
        )
    if change.low > 1 + TUNE_SHARE:
        return "tune", (
            f"acceptance has risen by more than {TUNE_SHARE:.0%}: longer drafts may pay; tune again"
        )
    if change.low < 1 - TUNE_SHARE or change.high > 1 + TUNE_SHARE:
        return "record", (
            f"the interval is too wide to tell a change of {TUNE_SHARE:.0%}; record more requests"
        )
    return "keep", "the preset was tuned on traffic like this"
