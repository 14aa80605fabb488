"""Recent traffic beside what a preset was tuned on: what is compared, what is left out, and when
which advice is given."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from d3d.errors import InvalidRequest
from d3d.hub.presets import AnswerRounds, PresetFile, Tuned, write_preset
from d3d.lab.stats import paired_ratio, unpaired_ratio
from d3d.lab.tune.calibrate import calibrate
from d3d.lab.tune.traffic import Record, traffic_journal
from support.command import d3d

Rounds = tuple[tuple[int, int, int], ...]


def rounds(mean: float, seed: int, count: int = 30) -> Rounds:
    """Rounds of drafts of 8 that commit `mean` tokens, more or less."""
    generator = random.Random(seed)
    kept = [max(0, min(8, round(generator.gauss(mean - 1, 1)))) for _ in range(count)]
    return tuple((8, number, number + 1) for number in kept)


def record(mean: float, seed: int, **fields: Any) -> Record:
    given: dict[str, Any] = {
        "date": "2026-01-01T00:00:00+00:00",
        "kind": "chat",
        "prompt_sha256": "x",
        "prompt_tokens": 9,
        "completion_tokens": 90,
        "finish_reason": "stop",
        "sampling": {},
        "mode": "serial",
        "options": {"draft_length": 8, "draft_confidence": 0.1},
        "target": "target",
        "drafter": "drafter",
        "rounds": rounds(mean, seed),
    }
    return Record(**(given | fields))


def preset(
    mean: float = 3.0, answers: int = 24, *, speed_up: float = 1.5, **fields: Any
) -> PresetFile:
    counted = [rounds(mean, 1000 + number) for number in range(answers)]
    tuned = Tuned(
        date="2026-01-01",
        machine={},
        versions={},
        target_fingerprint="target",
        drafter_fingerprint="drafter",
        prompts="mine.jsonl",
        prompts_sha256="0",
        num_prompts=answers,
        max_tokens=96,
        seed=0,
        trials=10,
        judged_on_other_prompts=True,
        ms_per_token=8.0,
        plain_ms_per_token=12.0,
        speed_up=speed_up,
        speed_up_interval=(speed_up, speed_up),
        answers=tuple(
            AnswerRounds(rounds=len(one), committed=sum(part[2] for part in one)) for one in counted
        ),
    )
    return PresetFile(
        target="t", mode="serial", draft_length=8, draft_confidence=0.1, tuned=tuned
    ).model_copy(update=fields)


def traffic(mean: float, count: int = 60, **fields: Any) -> list[Record]:
    return [record(mean, seed, **fields) for seed in range(count)]


@pytest.mark.parametrize(
    ("mean", "count", "advice", "words"),
    [
        (3.0, 200, "keep", "like this"),
        (3.0, 5, "record", "too few"),
        (2.7, 100, "tune", "fallen"),
        (3.5, 100, "tune", "risen"),
        (2.0, 100, "train", "d3d train"),
        (2.85, 20, "record", "too wide"),
    ],
)
def test_the_advice_follows_from_how_acceptance_has_changed(
    mean: float, count: int, advice: str, words: str
) -> None:
    found = calibrate(preset(answers=80), traffic(mean, count))
    assert (found.advice, found.compared) == (advice, count), found
    assert words in found.reason
    assert found.change is not None
    assert found.change.low < found.change.value < found.change.high
    assert found.tuned_length == pytest.approx(3.0, abs=0.1)
    assert found.recent_length == pytest.approx(mean, abs=0.2)


def test_where_drafting_has_become_slower_than_plain_decoding_that_is_said() -> None:
    found = calibrate(preset(answers=80, speed_up=1.05), traffic(2.7, 100))
    assert found.advice == "tune"
    assert "slower than plain" in found.reason
    assert found.expected_speed_up is not None
    assert found.expected_speed_up.high < 1


def test_requests_that_decoded_otherwise_are_counted_and_left_out() -> None:
    fitting = traffic(3.0, 30)
    others = [
        record(9.0, 1, target="another"),
        record(9.0, 2, mode="plain", drafter=None, options={}),
        record(9.0, 3, drafter="another"),
        record(9.0, 6, quantize="int8"),
        record(9.0, 4, options={"draft_length": 4, "draft_confidence": 0.1}),
        record(9.0, 5, options={"draft_length": 8}),
        record(
            9.0, 6, options={"draft_length": 8, "draft_confidence": 0.1, "num_denoise_steps": 2}
        ),
        record(9.0, 7, rounds=()),
    ]
    found = calibrate(preset(), [*others, *fitting])
    assert found.compared == 30
    assert found.change == calibrate(preset(), fitting).change
    wanted = {
        "another target": 1,
        "mode plain": 1,
        "another drafter": 1,
        "int8 weights": 1,
        "other options of its mode": 3,
        "no round": 1,
    }
    assert found.left_out == wanted


def test_a_preset_of_rounded_weights_is_compared_with_requests_of_such() -> None:
    rounded, others = traffic(3.0, 30, quantize="int8"), traffic(9.0, 5)
    found = calibrate(preset(quantize="int8"), [*rounded, *others])
    assert (found.compared, found.left_out) == (30, {"unrounded weights": 5})


def test_kinds_are_told_apart() -> None:
    mixed = [*traffic(4.0, 30), *traffic(2.0, 30, kind="later turn")]
    kinds = calibrate(preset(), mixed).kinds
    assert kinds["chat"] > 3.5 > 2.5 > kinds["later turn"]


def test_a_default_that_the_preset_does_not_name_is_no_other_option() -> None:
    """The draft length of a request is always recorded, the preset may leave it to its mode."""
    assert calibrate(preset(draft_length=None), traffic(3.0, 30)).compared == 30


def test_a_zero_that_asks_for_nothing_is_no_other_option() -> None:
    requests = traffic(
        3.0,
        30,
        options={"draft_length": 8, "draft_confidence": 0.1, "lookup": 0, "least_kept": 0.0},
    )
    assert calibrate(preset(), requests).compared == 30
    assert calibrate(preset(lookup=2), requests).compared == 0


@pytest.mark.parametrize("fields", [{"tuned": None}, {"mode": "plain"}])
def test_what_can_not_be_calibrated_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest):
        calibrate(preset(**fields), traffic(3.0))


def test_intervals_cover_what_they_say() -> None:
    """Of 200 samples of the same traffic, about 95 % have 1 within their interval."""
    covered = 0
    generator = random.Random(0)
    for seed in range(200):
        samples = [[(generator.gauss(3, 0.5), 1.0) for _ in range(40)] for _ in range(2)]
        interval = unpaired_ratio(samples[0], samples[1], seed=seed)
        covered += interval.low <= 1 <= interval.high
    assert 0.9 <= covered / 200 <= 0.99


def test_pairs_cancel_what_makes_a_prompt_slow() -> None:
    generator = random.Random(1)
    slow = [generator.uniform(1, 20) for _ in range(30)]
    own, other = [(one, 10.0) for one in slow], [(1.5 * one, 10.0) for one in slow]
    paired = paired_ratio(own, other)
    assert paired.value == pytest.approx(1.5)
    assert paired.high - paired.low < 1e-9


# The command


def test_the_command_reads_files(tmp_path: Path) -> None:
    write_preset(tmp_path / "mine.yaml", preset(answers=80))
    log = tmp_path / "traffic.jsonl"
    journal = traffic_journal(log)
    for one in traffic(3.5, 60) + traffic(2.0, 100):
        journal.append(one.model_dump_json(exclude_none=True))
    journal.append('{"traffic": 1, "dam')
    outcome = d3d("calibrate", log, "--model", tmp_path / "mine.yaml", "--last", 100)
    assert outcome.code == 0, outcome.err
    assert "advice             train" in outcome.out
    assert "compared           100 requests" in outcome.out
    assert "damaged" in outcome.err
    facts = d3d("calibrate", log, "--model", tmp_path / "mine.yaml", "--json").record
    assert facts["compared"] == 160
    assert len(facts["change"]) == 3


def test_the_command_refuses_what_is_no_preset_or_no_traffic(tmp_path: Path) -> None:
    write_preset(tmp_path / "mine.yaml", preset())
    (tmp_path / "empty.jsonl").write_text("")
    assert d3d("calibrate", tmp_path / "empty.jsonl", "--model", "smollm2-135m").is_refusal(
        "no preset file"
    )
    assert d3d("calibrate", tmp_path / "empty.jsonl", "--model", tmp_path / "mine.yaml").is_refusal(
        "no recorded request"
    )
