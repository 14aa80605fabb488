"""The second stage, and the whole command on a tiny model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from d3d.errors import InvalidRequest
from d3d.hub.presets import PresetFile, read_preset, write_preset
from d3d.lab.tune.confirm import Confirmation, finalists, with_plain
from d3d.lab.tune.measure import CaseResult
from d3d.lab.tune.prompts import grouped, split, tuning_prompts
from d3d.lab.tune.search import Trial
from d3d.lab.tune.setups import OWN, Setup
from d3d.lab.tune.tune import PRESET, open_models, placements, space_of
from d3d.loader import load
from d3d.methods.serial.config import SerialConfig
from d3d.model.int8 import quantizations
from support.command import Outcome, d3d
from support.tiny_model import write_tiny_drafter
from support.tuning import Formula

needs_kernel = pytest.mark.skipif(
    not quantizations(torch.device("cpu")), reason="this processor does not multiply bytes"
)

PROMPTS = [
    "how much is two and two?",
    "hello",
    "the cat sat",
    "world",
    "naive",
    "on the mat",
    "what is a cat?",
    "is two and two a hat?",
]


@pytest.fixture(autouse=True)
def _unsynced(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr("os.fsync", lambda _file: None)
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def quiet(_done: int, _text: str) -> None:
    pass


def serial(length: int, confidence: float | None = None, threads: int | None = 2) -> Setup:
    config = SerialConfig(draft_length=length, num_denoise_steps=1, draft_confidence=confidence)
    return Setup(config, OWN, threads)


def test_finalists_are_the_best_with_both_kinds_of_draft_length_and_the_default() -> None:
    best = [
        Trial(serial(6, 0.1), 0.5),
        Trial(serial(7, 0.1), 0.6),
        Trial(serial(8, 0.1), 0.65),
        Trial(serial(5), 0.7),
        Trial(serial(4), 0.8),
    ]
    assert finalists(best, 2, serial(3)) == [serial(6, 0.1), serial(7, 0.1), serial(5), serial(3)]
    assert finalists(best, 1, serial(6, 0.1)) == [serial(6, 0.1), serial(5)]


def test_plain_decoding_has_every_number_of_threads_that_a_finalist_has() -> None:
    setups = with_plain([serial(5), serial(6, threads=4), serial(7)])
    assert [(one.mode, one.threads) for one in setups] == [
        ("plain", 2),
        ("plain", 4),
        ("serial", 2),
        ("serial", 4),
        ("serial", 2),
    ]


def confirmation(directory: Path) -> Confirmation:
    return Confirmation(
        directory / "confirmed.jsonl", with_plain([serial(6, 0.1, 4), serial(2)]), (3, 4, 5)
    )


def test_the_fastest_is_first_and_compared_with_the_fastest_plain(tmp_path: Path) -> None:
    judged = confirmation(tmp_path).run(Formula(), quiet, lambda: False)
    assert judged is not None
    assert judged[0].setup == serial(6, 0.1, 4)
    assert judged[0].speed_up.value == pytest.approx(10 / 5.0), (
        "plain is faster with four threads than with two"
    )
    assert {one.equal for one in judged} == {3}
    assert judged[0].acceptance_length is not None
    assert next(one for one in judged if one.setup.mode == "plain").acceptance_length is None


def test_setups_take_turns_and_the_first_changes(tmp_path: Path) -> None:
    formula = Formula()
    confirmation(tmp_path).run(formula, quiet, lambda: False)
    assert [case for _, case in formula.asked] == [3] * 4 + [4] * 4 + [5] * 4
    firsts = [formula.asked[place][0] for place in (0, 4, 8)]
    assert len(set(firsts)) == 3


def test_what_was_measured_is_not_measured_again(tmp_path: Path) -> None:
    asked = iter(range(100))
    assert confirmation(tmp_path).run(Formula(), quiet, lambda: next(asked) >= 5) is None
    with (tmp_path / "confirmed.jsonl").open("a") as file:
        file.write('{"setup": {"mode"')
    formula = Formula()
    resumed = confirmation(tmp_path).run(formula, quiet, lambda: False)
    assert len(formula.asked) == 12 - 5
    assert resumed == confirmation(tmp_path / "..").run(Formula(), quiet, lambda: False)


def test_other_ids_than_plains_are_counted(tmp_path: Path) -> None:
    class Rounding(Formula):
        def __call__(self, setup: Setup, case: int) -> CaseResult:
            measured = super().__call__(setup, case)
            return (
                measured._replace(answers_sha256="other")
                if setup.mode == "serial" and case == 4
                else measured
            )

    judged = confirmation(tmp_path).run(Rounding(), quiet, lambda: False)
    assert judged is not None
    assert {one.setup.mode: one.equal for one in judged} == {"plain": 3, "serial": 2}


def test_answers_of_one_token_are_told(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="one token"):
        confirmation(tmp_path).run(lambda setup, case: CaseResult(0.0, 0), quiet, lambda: False)


@pytest.mark.parametrize(("count", "search"), [(1, 1), (3, 3), (4, 2), (12, 4), (24, 8)])
def test_a_third_searches_and_the_rest_confirms(count: int, search: int) -> None:
    parts = split(count)
    assert len(parts.search) == search
    assert parts.is_clean == (count >= 4)
    assert {*parts.search, *parts.confirm} == set(range(count))


def test_cases_have_as_many_prompts_as_are_answered_together() -> None:
    assert grouped([[1], [2], [3], [4], [5]], 2) == [[[1], [2]], [[3], [4]]]
    with pytest.raises(InvalidRequest, match="concurrency"):
        grouped([[1]], 2)


# The command


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in PROMPTS))
    return path


@pytest.fixture
def tune(
    tiny_target: Path, tiny_drafter: Path, prompts: Path, tmp_path: Path
) -> Callable[..., Outcome]:
    def run(
        *arguments: object, drafters: tuple[Path, ...] = (tiny_drafter,), source: Path = prompts
    ) -> Outcome:
        given = [part for drafter in drafters for part in ("--drafter", drafter)]
        fixed = ("--target", tiny_target, "--dtype", "float32", "--max-tokens", 8, "--threads", 1)
        return d3d("tune", source, tmp_path / "tuned", *fixed, *given, *arguments)

    return run


@pytest.mark.slow
def test_it_writes_a_preset_that_every_command_takes(
    tune: Callable[..., Outcome], tmp_path: Path, tiny_target: Path
) -> None:
    outcome = tune("--trials", 4, "--mode", "serial", "--mode", "fused", "--finalists", 1)
    assert outcome.code == 0, outcome.err
    path = tmp_path / "tuned" / PRESET
    assert outcome.out.splitlines()[-1] == str(path)
    assert "(default)" in outcome.out
    preset = read_preset(path)
    assert preset.tuned is not None
    assert (preset.target, preset.dtype, preset.tuned.trials, preset.tuned.num_prompts) == (
        str(tiny_target),
        "float32",
        4,
        8,
    )
    assert preset.tuned.judged_on_other_prompts
    assert preset.tuned.speed_up == pytest.approx(
        preset.tuned.plain_ms_per_token / preset.tuned.ms_per_token, rel=0.01
    )
    answer = d3d("generate", "--model", path, "--prompt", "hello", "--max-tokens", 6, "--json")
    plain = d3d(
        "generate",
        "--model",
        path,
        "--prompt",
        "hello",
        "--max-tokens",
        6,
        "--json",
        "--mode",
        "plain",
    )
    assert answer.code == 0, answer.err
    assert answer.record["token_ids"] == plain.record["token_ids"]
    assert str(preset.tuned.num_prompts) in d3d("show", path).out
    again = tune("--trials", 4, "--mode", "serial", "--mode", "fused", "--finalists", 1)
    assert again.code == 0
    assert read_preset(path).tuned == preset.tuned, "nothing is measured again"


@pytest.mark.slow
@needs_kernel
def test_rounded_weights_are_searched_with_recorded_and_honoured(
    tune: Callable[..., Outcome], tmp_path: Path, tiny_target: Path, tiny_drafter: Path
) -> None:
    assert tune("--trials", 2, "--mode", "serial", "--finalists", 1, "--quantize", "int8").code == 0
    path = tmp_path / "tuned" / PRESET
    preset = read_preset(path)
    assert preset.quantize == "int8"
    assert tune("--trials", 2, "--mode", "serial", "--finalists", 1).is_refusal("dtype", "int8"), (
        "an unrounded target is another one"
    )
    assert "int8" in d3d("show", path).out
    given = ("--prompt", "hello", "--max-tokens", 6)
    assert "int8" in d3d("generate", "--model", path, *given, "--dry-run").out
    answer = d3d("generate", "--model", path, *given, "--json").record
    plain = (
        "generate",
        "--target",
        tiny_target,
        "--dtype",
        "float32",
        "--mode",
        "plain",
        *given,
        "--json",
        "--quantize",
        "int8",
    )
    assert answer["quantize"] == "int8"
    assert answer["token_ids"] == d3d(*plain).record["token_ids"]
    (again,) = open_models(str(path), [str(tiny_drafter)], device="cpu", dtype="auto").values()
    assert again.quantize == "int8"
    assert d3d("profile", tmp_path / "profile.json", "--target", path).is_refusal(
        "int8", "not profiled"
    )


def test_what_a_preset_can_not_have_rounded_is_refused_by_name(
    tmp_path: Path, tiny_target: Path, tiny_drafter: Path
) -> None:
    fields = {
        "target": str(tiny_target),
        "drafter": str(tiny_drafter),
        "dtype": "float32",
        "mode": "serial",
    }
    write_preset(tmp_path / "odd.yaml", PresetFile(**fields, quantize="int3"))
    assert d3d("generate", "--model", tmp_path / "odd.yaml", "--prompt", "hello").is_refusal(
        "quantize", "int3"
    )


@pytest.mark.slow
def test_every_answer_is_plain_decodings(tune: Callable[..., Outcome], tmp_path: Path) -> None:
    assert tune("--trials", 3, "--mode", "serial", "--temperature", 0.8, "--seed", 3).code == 0
    rows = [
        json.loads(line)
        for line in (tmp_path / "tuned" / "confirmed.jsonl").read_text().splitlines()
    ]
    by_case: dict[int, set[str]] = {}
    for row in rows:
        by_case.setdefault(row["case"], set()).add(row["answers_sha256"])
    assert len(by_case) == 6
    assert {len(answers) for answers in by_case.values()} == {1}


@pytest.mark.slow
def test_several_drafters_and_several_prompts_at_a_time(
    tune: Callable[..., Outcome], tmp_path: Path, tiny_target: Path, tiny_drafter: Path
) -> None:
    shallow = write_tiny_drafter(tmp_path / "shallow", tiny_target, kept_layers=(0,), block_size=3)
    outcome = tune(
        "--trials", 4, "--mode", "serial", "--concurrency", 4, drafters=(tiny_drafter, shallow)
    )
    assert outcome.code == 0, outcome.err
    assert "2 times 4 prompts" in outcome.out
    assert "too few prompts to confirm" in outcome.err
    setups = [
        json.loads(line)["setup"]
        for line in (tmp_path / "tuned" / "confirmed.jsonl").read_text().splitlines()
    ]
    assert {setup["drafter"] for setup in setups} >= {str(tiny_drafter)}


def test_what_a_preset_file_says_of_threads_is_left_out(
    tiny_target: Path, tiny_drafter: Path, tmp_path: Path
) -> None:
    before = torch.get_num_threads()
    fields = {
        "target": str(tiny_target),
        "drafter": str(tiny_drafter),
        "dtype": "float32",
        "mode": "serial",
        "threads": before + 1,
    }
    write_preset(tmp_path / "old.yaml", PresetFile(**fields))
    (model,) = open_models(str(tmp_path / "old.yaml"), [], device="cpu", dtype="auto").values()
    assert model.preset is None
    assert torch.get_num_threads() == before


@pytest.mark.parametrize(
    ("device", "cores", "found"),
    [
        ("cpu", 1, ("thread",)),
        ("cpu", 2, ("thread", "processes")),
        ("cuda", 1, ("streams", "thread")),
        ("cuda", 8, ("streams", "thread")),
    ],
)
def test_the_draft_worker_is_tried_where_the_device_has_room_for_it(
    device: str, cores: int, found: tuple[str, ...]
) -> None:
    assert placements(torch.device(device), cores) == found


def test_drafters_share_the_target(tiny_target: Path, tiny_drafter: Path, tmp_path: Path) -> None:
    shallow = write_tiny_drafter(tmp_path / "shallow", tiny_target, kept_layers=(0,), block_size=3)
    models = open_models(
        str(tiny_target), [str(tiny_drafter), str(shallow)], device="cpu", dtype="float32"
    )
    one, other = models.values()
    assert one.parts.target is other.parts.target
    assert one.drafter_fingerprint != other.drafter_fingerprint
    space = space_of(models, ("serial", "fused", "async"), (1,))
    assert [facts[1:] for facts in space.drafters] == [(6, 5), (3, 0)], (
        "a drafter of other layers has no fused mode"
    )
    with pytest.raises(InvalidRequest, match="fused"):
        space_of({"shallow": other}, ("fused",), (1,))


@pytest.mark.parametrize("recorded", [False, True])
def test_prompts_that_cannot_be_asked_are_left_out(
    recorded: bool, tiny_target: Path, tmp_path: Path
) -> None:
    model = load(str(tiny_target), device="cpu", dtype="float32")
    texts = ("hello", "the cat " * 200)
    file = tmp_path / "p.jsonl"
    if recorded:
        given = ("--target", tiny_target, "--dtype", "float32", "--max-tokens", 1)
        for _ in texts:
            d3d("generate", "hello", *given, "--record", file, "--record-text")
        lines = file.read_text().splitlines()
        file.write_text(
            "\ufeff" + "\n".join((lines[0], lines[1].replace("hello", texts[1]))) + "\n"
        )
    else:
        rows = [{"prompt": text} for text in (*texts, "x \ud800")]
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = tuning_prompts(file, model, limit=9, seed=0)
    assert found.token_ids == [model.encode("hello")]
    assert len(found.notes) == (1 if recorded else 2)
    assert "a prompt that leaves no room" in found.notes[-1]


@pytest.mark.slow
def test_recorded_traffic_with_text_will_do(
    tune: Callable[..., Outcome], tiny_target: Path, tiny_drafter: Path, tmp_path: Path
) -> None:
    log = tmp_path / "traffic.jsonl"
    given = (
        "--target",
        tiny_target,
        "--drafter",
        tiny_drafter,
        "--dtype",
        "float32",
        "--max-tokens",
        3,
        "--record",
        log,
    )
    d3d("generate", "--prompt", "without text", *given)
    assert tune(source=log).is_refusal("no prompt to tune on", "--record-text")
    for text in PROMPTS[:4]:
        d3d("generate", "--prompt", text, *given, "--record-text")
    outcome = tune("--trials", 2, "--mode", "serial", source=log)
    assert outcome.code == 0, outcome.err
    assert "left out 1 rows: a request without text" in outcome.err
    assert read_preset(tmp_path / "tuned" / PRESET).tuned.num_prompts == 4  # type: ignore[union-attr]


@pytest.mark.slow
def test_an_interrupted_tune_goes_on(
    tune: Callable[..., Outcome], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from d3d.lab.tune import tune as module

    count = iter(range(10**6))
    real = module.tune
    monkeypatch.setattr(module, "tune", lambda *given: real(*given[:-1], lambda: next(count) >= 3))
    outcome = tune("--trials", 3, "--mode", "serial")
    assert outcome.code == 130
    assert "goes on" in outcome.err
    assert not (tmp_path / "tuned" / PRESET).exists()
    monkeypatch.setattr(module, "tune", real)
    assert tune("--trials", 3, "--mode", "serial").code == 0


@pytest.mark.slow
def test_what_can_not_be_tuned_is_refused(
    tune: Callable[..., Outcome], tiny_target: Path, prompts: Path, tmp_path: Path
) -> None:
    assert tune(drafters=()).is_refusal("no drafter to tune", "--drafter")
    assert tune("--mode", "plain").is_refusal("plain", "serial, fused, async")
    assert tune("--concurrency", 9).is_refusal("concurrency", "9")
    assert tune(source=tmp_path / "nothing.jsonl").code == 2
    assert tune("--model", "smollm2-135m").is_refusal("--model", "--target")
    assert d3d("tune", prompts, tmp_path / "tuned", "--model", "nonsense").is_refusal("nonsense")
    tune("--trials", 1, "--mode", "serial")
    assert tune("--trials", 1, "--mode", "serial", "--seed", 5).is_refusal("another directory")
