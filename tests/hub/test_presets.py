"""Presets as files: what they may hold, what is refused, and that every command takes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import d3d
from d3d.errors import InvalidCheckpoint
from d3d.hub.footprint import model_config
from d3d.hub.names import drafter_of, is_here, resolve_drafter, resolve_model, resolve_tokenizer
from d3d.hub.presets import AnswerRounds, PresetFile, Tuned, read_preset, write_preset
from d3d.loader import preset_of
from d3d.methods.auto.config import AutoConfig
from d3d.methods.fused.config import FusedConfig
from support.command import d3d as command

TUNED = Tuned(
    date="2026-01-02",
    machine={"processor": "abacus", "threads": 2},
    versions={"d3d": "0"},
    target_fingerprint="abc",
    drafter_fingerprint="def",
    prompts="mine.jsonl",
    prompts_sha256="0123456789abcdef",
    num_prompts=2,
    max_tokens=64,
    seed=0,
    trials=7,
    judged_on_other_prompts=True,
    ms_per_token=8.0,
    plain_ms_per_token=12.0,
    speed_up=1.5,
    speed_up_interval=(1.4, 1.6),
    answers=(AnswerRounds(rounds=10, committed=31), AnswerRounds(rounds=10, committed=29)),
)


@pytest.fixture
def preset(tiny_target: Path, tiny_drafter: Path, tmp_path: Path) -> Any:
    """Writes a preset file of the tiny target and drafter."""

    def write(name: str = "mine.yaml", **fields: Any) -> Path:
        path = tmp_path / name
        given = {
            "target": str(tiny_target),
            "drafter": str(tiny_drafter),
            "dtype": "float32",
            "mode": "serial",
        } | fields
        write_preset(path, PresetFile(**given))
        return path

    return write


@pytest.fixture(autouse=True)
def _threads() -> Any:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_what_is_written_is_read(preset: Any) -> None:
    path = preset(draft_length=3, draft_confidence=0.25, threads=1, tuned=TUNED)
    assert read_preset(path) == PresetFile.model_validate(yaml.safe_load(path.read_text()))
    assert read_preset(path).tuned == TUNED
    assert not list(path.parent.glob("*.partial"))


def test_json_is_as_good(tiny_target: Path, tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({"format": 1, "target": str(tiny_target), "mode": "plain"}))
    assert read_preset(path).mode == "plain"
    assert d3d.load(str(path), dtype="float32").default_method == "plain"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (
            "target: x\nmode: serial\ndraft_lenght: 3\n",
            ["draft_lenght", "no such key", "draft_length"],
        ),
        ("target: x\nmode: serial\nformat: 2\n", ["format", "another version", "format 1"]),
        ("mode: serial\n", ["target", "required"]),
        ("target: x\nmode: serial\ndraft_length: many\n", ["draft_length", "integer"]),
        ("target: x\nmode: serial\nthreads: 0\n", ["threads"]),
        ("target: other.yaml\nmode: serial\n", ["target", "another preset file"]),
        ("- a\n- b\n", ["must hold keys"]),
        ("target: [\n", ["can't be read as YAML"]),
        ("", ["must hold keys"]),
    ],
)
def test_damage_is_told_by_file_and_key(content: str, words: list[str], tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(content)
    with pytest.raises(InvalidCheckpoint) as caught:
        preset_of(str(path))
    assert all(word in str(caught.value) for word in [str(path), *words]), caught.value


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"mode": "magic"}, ["mode", "magic", "serial"]),
        ({"mode": "plain", "draft_length": 3}, ["draft_length", "plain"]),
        ({"mode": "serial", "rows": 9}, ["rows", "serial"]),
        ({"mode": "fused", "draft_confidence": 0.2}, ["draft_confidence", "fused"]),
    ],
)
def test_options_that_do_not_fit_each_other_are_refused_before_anything_is_loaded(
    fields: dict[str, Any], words: list[str], preset: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = preset(**fields)
    monkeypatch.setattr("d3d.loader.open_model", lambda *_, **__: pytest.fail("loaded"))
    with pytest.raises(InvalidCheckpoint) as caught:
        d3d.load(str(path))
    assert all(word in str(caught.value) for word in [str(path), *words]), caught.value


def test_a_missing_file_is_named() -> None:
    with pytest.raises(InvalidCheckpoint, match=r"no preset file .*nowhere\.yaml"):
        d3d.load("nowhere.yaml")


def test_its_choices_hold_where_a_request_says_nothing(preset: Any) -> None:
    model = d3d.load(str(preset(draft_length=3, num_denoise_steps=2, threads=1)), device="cpu")
    assert model.dtype_name == "float32"
    assert torch.get_num_threads() == 1
    result = model.generate("hello", max_tokens=12)
    assert result.speculation is not None
    assert (
        result.speculation.mode,
        result.speculation.draft_length,
        result.speculation.num_denoise_steps,
    ) == ("serial", 3, 2)


def test_what_a_request_says_goes_before(preset: Any) -> None:
    model = d3d.load(str(preset(draft_length=3, draft_confidence=1.0)), device="cpu")
    longer = model.generate(
        "hello", max_tokens=12, draft_length=5, draft_confidence=0.0
    ).speculation
    assert longer is not None
    assert longer.draft_length == 5
    other = model.generate("hello", max_tokens=12, mode="fused", rows=6).speculation
    assert other is not None
    assert other.mode == "fused", "another mode has nothing of the file's options"


def test_lookup_and_pauses_of_the_file_hold_in_serial_and_in_auto_mode_and_can_be_switched_off(
    preset: Any,
) -> None:
    model = d3d.load(str(preset(draft_length=4, lookup=1, least_kept=9.0)), device="cpu")
    prompt = "one two one two one two one two"
    there = model.generate(prompt, max_tokens=24, ignore_eos=True).speculation
    assert there is not None
    assert there.lookup_rounds > 0
    assert there.to_dict()["lookup_rounds"] == there.lookup_rounds
    assert there.to_dict()["undrafted_rounds"] > 0, "no draft keeps nine tokens"
    off = model.generate(prompt, max_tokens=24, ignore_eos=True, lookup=0, least_kept=0).speculation
    assert off is not None
    assert off.lookup_rounds == 0
    assert "lookup_rounds" not in off.to_dict()
    assert "undrafted_rounds" not in off.to_dict()
    auto = model.generate(prompt, max_tokens=48, ignore_eos=True, mode="auto").speculation
    assert auto is not None
    assert auto.lookup_rounds > 0


def test_what_a_serial_preset_spares_is_all_that_auto_mode_takes_of_it(preset: Any) -> None:
    model = d3d.load(
        str(preset(draft_length=6, num_denoise_steps=3, lookup=2, draft_confidence=0.1)),
        device="cpu",
    )
    config = model.config(method="auto", draft_length=1)
    assert config == AutoConfig(draft_length=1, lookup=2, draft_confidence=0.1)
    assert model.config(method="fused") == FusedConfig()
    auto = model.generate("hello", max_tokens=8, mode="auto").speculation
    assert auto is not None
    assert auto.choice is not None
    assert "fused" not in auto.choice.left_out


def test_auto_mode_without_a_drafter_minds_nothing_of_a_serial_preset(preset: Any) -> None:
    model = d3d.load(
        str(preset(draft_length=3, lookup=2, least_kept=0.5)), device="cpu", plain=True
    )
    assert (
        model.generate("hello", max_tokens=4, mode="auto").token_ids
        == model.generate("hello", max_tokens=4, mode="plain").token_ids
    )


def test_another_drafter_goes_with_its_choices(preset: Any, tiny_drafter: Path) -> None:
    path = preset(drafter=None, draft_length=2)
    assert d3d.load(str(path)).default_method == "plain", "there is no drafter"
    model = d3d.load(str(path), tiny_drafter)
    assert model.generate("hello", max_tokens=8).speculation.draft_length == 2  # type: ignore[union-attr]


def test_paths_count_from_the_file_itself(
    tiny_target: Path, tiny_drafter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model").symlink_to(tiny_target)
    (tmp_path / "drafter").symlink_to(tiny_drafter)
    (tmp_path / "mine.yml").write_text("target: model\ndrafter: ./drafter\nmode: serial\n")
    monkeypatch.chdir("/")
    source = str(tmp_path / "mine.yml")
    assert resolve_model(source).resolve() == tiny_target
    assert resolve_tokenizer(source).resolve() == tiny_target
    assert resolve_drafter(source).resolve() == tiny_drafter
    assert drafter_of(source) is not None
    assert is_here(source)
    assert model_config(source).vocab_size > 0


def test_what_is_written_can_be_read_from_anywhere(
    tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tiny_target.parent)
    write_preset(tmp_path / "mine.yaml", PresetFile(target=tiny_target.name, mode="plain"))
    monkeypatch.chdir("/")
    assert resolve_model(str(tmp_path / "mine.yaml")) == tiny_target


def test_the_name_of_a_preset_goes_before_a_directory_of_that_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "smollm2-135m").mkdir()
    monkeypatch.chdir(tmp_path)
    write_preset(tmp_path / "mine.yaml", PresetFile(target="smollm2-135m", mode="plain"))
    assert read_preset(tmp_path / "mine.yaml").target == "smollm2-135m"


def test_a_preset_without_a_drafter_has_none_to_evaluate(preset: Any) -> None:
    with pytest.raises(InvalidCheckpoint, match="names no drafter"):
        resolve_drafter(str(preset(drafter=None)))


# Commands


@pytest.mark.parametrize("option", ["--model", "--target"])
def test_generate_takes_it(option: str, preset: Any) -> None:
    path = preset(draft_length=3)
    outcome = command("generate", option, path, "--prompt", "hello", "--max-tokens", 9, "--json")
    assert outcome.code == 0, outcome.err
    assert len(outcome.record["speculation"]["acceptance_at"]) == 3
    plain = command(
        "generate",
        option,
        path,
        "--prompt",
        "hello",
        "--max-tokens",
        9,
        "--json",
        "--mode",
        "plain",
    )
    assert plain.record["token_ids"] == outcome.record["token_ids"]


def test_generate_cuts_drafts_that_are_not_confident(preset: Any) -> None:
    given = (
        "generate",
        "--model",
        preset(draft_length=6),
        "--prompt",
        "hello",
        "--max-tokens",
        20,
        "--json",
    )
    whole, cut = command(*given), command(*given, "--draft-confidence", 1.0)
    assert cut.record["token_ids"] == whole.record["token_ids"]
    assert (
        cut.record["speculation"]["acceptance_rate"]
        == 1.0
        > whole.record["speculation"]["acceptance_rate"]
    )
    assert command(*given, "--draft-confidence", 1.5).is_refusal("draft_confidence", "1.5")
    assert command(*given, "--mode", "fused", "--draft-confidence", 0.5).is_refusal(
        "draft_confidence", "serial"
    )


def test_chat_and_demo_take_it(preset: Any) -> None:
    path = preset(mode="fused", rows=8)
    assert (
        "speculation: fused"
        in command("chat", "--model", path, "--max-tokens", 4, stdin="hello\n").err
    )
    demo = command("demo", "--model", path, "--max-tokens", 4)
    assert demo.code == 0, demo.err
    assert "[fused]" in demo.out
    assert command("demo", "--model", preset("plain.yaml", mode="plain")).is_refusal(
        "decodes plainly"
    )


def test_bench_runs_its_choices(preset: Any, tmp_path: Path) -> None:
    prompts = tmp_path / "own.jsonl"
    prompts.write_text('{"prompt": "hello"}\n')
    given = (
        "--target",
        preset(draft_length=3, draft_confidence=0.1),
        "--method",
        "serial",
        "--max-tokens",
        6,
        "--results",
        tmp_path,
        "--set",
        prompts,
    )
    outcome = command("bench", "run", "one", *given)
    assert outcome.code == 0, outcome.err
    rows = [
        json.loads(line) for line in (tmp_path / "one" / "results.jsonl").read_text().splitlines()
    ]
    assert {(row["method"], row["setting"]["draft_length"]) for row in rows} == {
        ("plain", None),
        ("serial", 3),
    }
    (session,) = json.loads((tmp_path / "one" / "provenance.json").read_text())["sessions"]
    assert session["methods"]["serial"]["options"] == {"draft_length": 3, "draft_confidence": 0.1}
    assert "options" not in session["methods"]["plain"]


def test_evaluate_takes_target_and_drafter_from_it(
    preset: Any, tiny_target: Path, tmp_path: Path
) -> None:
    prompts = tmp_path / "own.jsonl"
    prompts.write_text('{"prompt": "hello"}\n')
    corpus = tmp_path / "corpus.jsonl"
    made = command(
        "data",
        corpus,
        "--target",
        tiny_target,
        "--prompts",
        prompts,
        "--max-tokens",
        12,
        "--dtype",
        "float32",
    )
    assert made.code == 0, made.err
    outcome = command("evaluate", preset(), corpus, "--dtype", "float32")
    assert outcome.code == 0, outcome.err
    assert outcome.record["answers"] == 1


def test_show_tells_what_it_holds_and_where_from(preset: Any) -> None:
    path = preset(draft_length=3, tuned=TUNED)
    shown = command("show", path)
    assert shown.code == 0, shown.err
    for words in (
        "draft_length       3",
        "1.50 times as fast (1.40 to 1.60)",
        "mine.jsonl",
        "abacus",
        "acceptance length  3.00 over 20",
    ):
        assert words in shown.out
    assert command("show", path, "--json").record["tuned"]["trials"] == 7
    assert "tuned              no" in command("show", preset("by_hand.yaml")).out
    assert "Apache-2.0" in command("show", "smollm2-135m").out
    assert command("show", "nonsense").is_refusal("nonsense", "smollm2-135m")


def test_the_preset_that_comes_with_d3d_is_a_file_with_a_name() -> None:
    shown = command("show", "smollm2-135m-fast")
    assert shown.code == 0, shown.err
    assert "target             smollm2-135m\n" in shown.out
    assert command("show", "smollm2-135m-fast", "--json").record["mode"] == "serial"
    assert "smollm2-135m-fast" in command("pull").out
    assert command("show", "nonsense").is_refusal("smollm2-135m-fast")
