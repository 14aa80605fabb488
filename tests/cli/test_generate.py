"""`d3d generate` on a tiny model: what every flag does, what is printed where, and what is
refused."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from d3d.cli.show import Painter, paint
from d3d.hub.checkpoint import save_drafter
from d3d.results import StreamChunk
from support.command import Outcome, d3d
from support.tiny_model import (
    open_tiny,
    random_drafter,
    tiny_tokenizer,
    write_tiny_drafter,
    write_tiny_target,
)

ANSI = re.compile(r"\x1b\[[0-9;]*m")


@pytest.fixture
def generate(tiny_target: Path, tiny_drafter: Path) -> Any:
    """`d3d generate` with the tiny target and drafter in float32; 20 tokens unless said
    otherwise."""

    def run(*arguments: object, prompt: str = "hello", stdin: str | bytes = "") -> Outcome:
        given = [str(argument) for argument in arguments]
        defaults = {"--max-tokens": "20", "--dtype": "float32", "--target": str(tiny_target)}
        if "plain" not in given:
            defaults["--drafter"] = str(tiny_drafter)
        extra = [
            part for name, value in defaults.items() if name not in given for part in (name, value)
        ]
        return d3d("generate", "--prompt", prompt, *given, *extra, stdin=stdin)

    return run


def ids(outcome: Outcome) -> list[int]:
    assert outcome.code == 0, outcome.err
    return list(outcome.record["token_ids"])


# What is printed


def test_text_goes_to_standard_output_and_a_summary_to_standard_error(generate: Any) -> None:
    outcome = generate()
    assert outcome.code == 0
    record = generate("--json").record
    assert outcome.out == record["text"] + "\n"
    assert re.search(
        r"20 tokens, [\d.]+ ms a token, first after \d+ ms, float32, length; speculation: serial, "
        r"\d+ rounds, acceptance length",
        outcome.err,
    )
    assert outcome.err.count("\n") == 1


def test_json_is_the_last_line_and_has_exactly_the_documented_shape(generate: Any) -> None:
    outcome = generate("--json")
    record = outcome.record
    assert outcome.out == record["text"] + "\n" + outcome.out.splitlines()[-1] + "\n"
    assert {
        name: set(value) if isinstance(value, dict) else None for name, value in record.items()
    } == {
        "text": None,
        "token_ids": None,
        "finish_reason": None,
        "usage": {"prompt_tokens", "completion_tokens"},
        "timing": {"ttft_s", "tpot_s", "tokens_per_s"},
        "speculation": {
            "mode",
            "rounds",
            "acceptance_length",
            "acceptance_rate",
            "acceptance_at",
            "num_accepted_histogram",
        },
    }
    assert record["speculation"]["mode"] == "serial"
    assert record["usage"]["completion_tokens"] == len(record["token_ids"]) == 20
    assert record["finish_reason"] == "length"


@pytest.mark.parametrize(
    "sampling", [(), ("--temperature", 0.8, "--seed", 3)], ids=["greedy", "seeded"]
)
def test_plain_and_serial_have_equal_ids(sampling: tuple[object, ...], generate: Any) -> None:
    plain, serial = (
        generate("--json", "--mode", "plain", *sampling),
        generate("--json", "--mode", "serial", *sampling),
    )
    assert ids(plain) == ids(serial)
    assert plain.record["speculation"] is None
    assert "speculation: off (plain mode)" in plain.err


@pytest.mark.parametrize(
    "sampling", [(), ("--temperature", 0.8, "--seed", 3)], ids=["greedy", "seeded"]
)
def test_fused_has_plains_ids_within_its_rows(sampling: tuple[object, ...], generate: Any) -> None:
    plain, fused = (
        generate("--json", "--mode", "plain", *sampling),
        generate("--json", "--mode", "fused", "--rows", 9, *sampling),
    )
    assert ids(plain) == ids(fused)
    assert fused.record["speculation"]["mode"] == "fused"
    assert fused.record["speculation"]["undrafted_rounds"] >= 1
    assert "speculation: fused" in fused.err


def test_fused_refuses_a_drafter_that_is_not_the_target_with_deltas(
    tiny_target: Path, tmp_path: Path
) -> None:
    base = open_tiny(tiny_target)
    save_drafter(tmp_path / "full", random_drafter(base, scope=None), base)
    given = (
        "generate",
        "--prompt",
        "hello",
        "--target",
        tiny_target,
        "--drafter",
        tmp_path / "full",
        "--dtype",
        "float32",
    )
    assert d3d(*given, "--mode", "fused").is_refusal(
        "deltas at slots only", "serial and plain work"
    )


def test_plain_mode_needs_no_drafter_and_no_mode_without_one_is_plain(tiny_target: Path) -> None:
    given = (
        "generate",
        "--prompt",
        "hello",
        "--target",
        tiny_target,
        "--max-tokens",
        3,
        "--dtype",
        "float32",
    )
    assert d3d(*given, "--mode", "plain").code == 0
    assert "off (no drafter was given" in d3d(*given).err


@pytest.mark.parametrize(
    "prompt",
    ["-x", "--help", "[bold]two[/bold] [/nonsense]", "a\tb\r\nc", ":smile: http://x.y/[1]"],
)
def test_prompts_are_taken_literally(prompt: str, generate: Any, tiny_target: Path) -> None:
    import d3d as package

    model = package.load(str(tiny_target), dtype="float32")
    assert generate("--json", prompt=prompt).record["usage"]["prompt_tokens"] == len(
        model.encode(prompt)
    )


TRICKY = "[bold]x[/] :smile:\ta\r\n  " + "long " * 60 + "   \n\n"


def test_a_models_text_is_written_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    """No markup, no wrapping, no expanded tabs, plain or coloured."""
    from d3d.cli.show import stream_answer

    tokenizer = tiny_tokenizer()
    token_ids = tokenizer.encode(TRICKY)
    done: Any = object()
    for colored in (None, tokenizer):
        chunks = [
            StreamChunk(tokenizer.decode([token_id]), (token_id,), 0, done)
            for token_id in token_ids
        ]
        assert stream_answer(chunks, tokenizer=colored) is done
        assert ANSI.sub("", capsys.readouterr().out) == TRICKY + "\n"


# The prompt


def test_a_dash_reads_standard_input_without_its_last_newline(generate: Any) -> None:
    assert ids(generate("--json", prompt="-", stdin="hello\n")) == ids(generate("--json"))
    assert ids(generate("--json", prompt="-", stdin="hello\n\n")) != ids(generate("--json"))


def test_raw_leaves_the_template_out(generate: Any) -> None:
    raw, templated = generate("--json", "--raw").record, generate("--json").record
    assert raw["usage"]["prompt_tokens"] < templated["usage"]["prompt_tokens"]
    assert raw["token_ids"] != templated["token_ids"]


def test_thinking_reaches_the_template_and_is_recorded(generate: Any) -> None:
    runs = {
        flag: generate("--json", *flag).record for flag in ((), ("--thinking",), ("--no-thinking",))
    }
    assert [run.get("thinking") for run in runs.values()] == [None, True, False]
    counts = [run["usage"]["prompt_tokens"] for run in runs.values()]
    assert counts[0] < counts[1] < counts[2]


def test_thinking_warns_where_the_template_has_no_such_switch(
    generate: Any, tiny_target: Path, tmp_path: Path
) -> None:
    copy = Path(shutil.copytree(tiny_target, tmp_path / "t"))
    (copy / "chat_template.jinja").write_text("{{ messages[0].content }}")
    outcome = generate("--thinking", "--target", copy, "--mode", "plain")
    assert outcome.code == 0
    assert "does not look at enable_thinking" in outcome.err


# Sampling flags


def test_max_tokens(generate: Any) -> None:
    assert len(ids(generate("--json", "--max-tokens", 7))) == 7


def test_temperature_and_seed(generate: Any) -> None:
    one, again, other = (
        generate("--json", "--temperature", 1.2, "--seed", seed) for seed in (1, 1, 2)
    )
    assert ids(one) == ids(again) != ids(other)
    assert one.record["seed"] == 1
    assert ids(one) != ids(generate("--json"))
    drawn = generate("--json", "--temperature", 1.2)
    assert ids(generate("--json", "--temperature", 1.2, "--seed", drawn.record["seed"])) == ids(
        drawn
    )


@pytest.mark.parametrize("flag", [("--top-k", 1), ("--top-p", 1e-6), ("--min-p", 1.0)], ids=str)
def test_a_filter_that_leaves_one_token_is_greedy(flag: tuple[str, float], generate: Any) -> None:
    assert ids(generate("--json", "--temperature", 1.5, "--seed", 4, *flag)) == ids(
        generate("--json")
    )


@pytest.mark.parametrize("flag", ["--presence-penalty", "--frequency-penalty"])
def test_a_penalty_forbids_repeats(flag: str, generate: Any) -> None:
    loop = ("--json", "--logit-bias", "70:40", "--max-tokens", 12)
    assert ids(generate(*loop)) == [70] * 12
    assert ids(generate(*loop, flag, 100)).count(70) < 12


def test_repetition_penalty_keeps_tokens_from_coming_twice(generate: Any) -> None:
    penalised = ids(generate("--json", "--repetition-penalty", 100))
    assert penalised != ids(generate("--json"))
    assert len(set(penalised)) == len(penalised)


def test_logit_bias_may_be_repeated(generate: Any) -> None:
    assert ids(generate("--json", "--logit-bias", "70:1000", "--logit-bias", "71:900")) == [70] * 20
    assert ids(generate("--json", "--logit-bias", "70:900", "--logit-bias", "71:1000")) == [71] * 20


def test_stop_token_id_ends_and_min_tokens_puts_it_off(generate: Any) -> None:
    whole = ids(generate("--json"))
    end = next(token_id for token_id in whole[2:] if whole.index(token_id) >= 2)
    stopped = generate("--json", "--stop-token-id", end, "--stop-token-id", 299)
    assert ids(stopped) == whole[: whole.index(end) + 1]
    assert stopped.record["finish_reason"] == "stop"
    assert end not in ids(generate("--json", "--stop-token-id", end, "--min-tokens", 15))[:14]


def test_stop_ends_before_the_string(generate: Any) -> None:
    text = generate("--json", "--max-tokens", 30).record["text"]
    stop = text[len(text) // 2 :][:2]
    outcome = generate("--json", "--max-tokens", 30, "--stop", stop, "--stop", "not there")
    assert outcome.record["text"] == text[: text.index(stop)]
    assert outcome.record["finish_reason"] == "stop"
    assert outcome.out.startswith(outcome.record["text"] + "\n")


def test_logprobs_are_in_the_record(generate: Any) -> None:
    record = generate("--json", "--logprobs", 3).record
    assert [entry["token_id"] for entry in record["logprobs"]] == record["token_ids"]
    assert all(len(entry["top"]) >= 3 for entry in record["logprobs"])


# Drafting, device, dtype


def test_draft_length_is_the_width_of_a_round(generate: Any) -> None:
    for length in (1, 6):
        assert (
            len(generate("--json", "--draft-length", length).record["speculation"]["acceptance_at"])
            == length
        )


def test_denoise_steps_run_more_drafter_passes(
    generate: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from d3d.methods.serial.denoise import BlockDenoiser

    passes, real = [0], BlockDenoiser._choose

    def counted(self: BlockDenoiser, *rest: Any, **options: Any) -> Any:
        passes[0] += 1
        return real(self, *rest, **options)

    monkeypatch.setattr(BlockDenoiser, "_choose", counted)
    per_round = []
    for steps in (1, 3):
        passes[0] = 0
        outcome = generate("--json", "--denoise-steps", steps)
        assert ids(outcome) == ids(generate("--json", "--mode", "plain"))
        per_round.append(passes[0] / outcome.record["speculation"]["rounds"])
    assert per_round[0] <= 1
    assert per_round[1] > 2 * per_round[0]


def test_dtype_and_device_reach_the_model(generate: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from d3d import loader

    seen = []
    real = loader.open_model
    monkeypatch.setattr(
        loader,
        "open_model",
        lambda *arguments, **options: seen.append(real(*arguments, **options)) or seen[-1],
    )
    assert generate("--dtype", "bfloat16", "--device", "cpu").code == 0
    assert generate("--dtype", "auto", "--device", "auto").code == 0
    assert seen[0].transformer.dtype == torch.bfloat16
    assert seen[0].transformer.device.type == "cpu"


# Colour


def test_color_shows_kept_and_own_tokens_and_loses_no_text(generate: Any) -> None:
    plain, colored = generate("--json"), generate("--json", "--color")
    assert colored.record["text"] == plain.record["text"]
    shown = "\n".join(colored.out.splitlines()[:-1])
    assert ANSI.sub("", shown) == plain.record["text"].replace("\r", "\n")
    assert "\x1b[32m" in shown, "a kept token"
    assert "\x1b[1m" in shown, "one of the target's own"
    assert "drafted and kept" in colored.err
    assert "\x1b" not in plain.out


def test_a_character_of_several_tokens_is_whole_and_belongs_to_the_last() -> None:
    tokenizer = tiny_tokenizer(["abc"])
    text = "a你é!"
    token_ids = tokenizer.encode(text)
    assert len(token_ids) == 7, "bytes"
    painter = Painter(tokenizer)
    chunks = [
        StreamChunk("a", tuple(token_ids[:2]), 2),  # a and a third of 你, both kept
        StreamChunk("你", tuple(token_ids[2:5]), 2),  # its rest kept; half an é of the target's own
        StreamChunk("é!", tuple(token_ids[5:]), 1),
    ]
    pieces = [piece for chunk in chunks for piece in painter.pieces(chunk)]
    assert pieces == [("a", True), ("你", True), ("é", True), ("!", False)]


def test_text_that_a_stop_string_held_back_keeps_its_colour() -> None:
    tokenizer = tiny_tokenizer(["abc"])
    token_ids = tokenizer.encode("xyzw")
    painter = Painter(tokenizer)
    assert list(painter.pieces(StreamChunk("x", tuple(token_ids[:2]), 2))) == [("x", True)]
    assert list(painter.pieces(StreamChunk("", (token_ids[2],), 0))) == []
    assert list(painter.pieces(StreamChunk("yz", (token_ids[3],), 0))) == [
        ("y", True),
        ("z", False),
    ]


def test_half_a_character_at_the_end_is_shown() -> None:
    tokenizer = tiny_tokenizer(["abc"])
    painter = Painter(tokenizer)
    half = tokenizer.encode("é")[0]
    assert list(painter.pieces(StreamChunk("\ufffd", (half,), 1))) == [("\ufffd", True)]
    assert paint("x", True) != paint("x", False) != "x"


# Refusals


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--max-tokens", 0), ["max_tokens"]),
        (("--max-tokens", -3), ["max_tokens"]),
        (("--temperature", -1), ["temperature"]),
        (("--top-p", 0), ["top_p"]),
        (("--min-tokens", 30), ["min_tokens (30)", "max_tokens (20)"]),
        (("--seed", -1), ["seed"]),
        (("--stop", ""), ["stop"]),
        (("--logprobs", 99, "--json"), ["logprobs"]),
        (("--logprobs", 2), ["--logprobs", "--json"]),
        (("--logit-bias", "5"), ["--logit-bias '5'", "ID:VALUE"]),
        (("--logit-bias", "5000:1"), ["5000", "vocabulary"]),
        (("--stop-token-id", 5000), ["5000", "vocabulary"]),
        (("--mode", "turbo"), ["method: 'turbo'", "plain, serial"]),
        (("--dtype", "int4"), ["dtype: 'int4'", "float32"]),
        (("--device", "tpu"), ["device: 'tpu'"]),
        (("--device", "cpu:x"), ["device"]),
        (("--draft-length", 0), ["draft_length: 0", "greater than or equal to 1"]),
        (("--draft-length", 7), ["draft_length: 7", "6"]),
        (("--denoise-steps", 0), ["num_denoise_steps: 0"]),
        (("--mode", "plain", "--draft-length", 2), ["draft_length", "plain"]),
        (("--mode", "plain", "--denoise-steps", 1), ["num_denoise_steps", "plain"]),
        (("--mode", "fused", "--denoise-steps", 1), ["num_denoise_steps", "fused"]),
        (("--mode", "fused", "--rows", 1), ["rows: 1", "greater than or equal to 2"]),
        (("--rows", 9), ["rows", "serial", "fused"]),
        (("--raw", "--thinking"), ["thinking"]),
        (("--model", "smollm2-135m"), ["name two targets"]),
        (("--target", "nonsense"), ["no model 'nonsense'"]),
        (("--target", "/no/such/model.gguf"), ["there is no file /no/such/model.gguf"]),
        (("--drafter", "nonsense"), ["no drafter 'nonsense'"]),
    ],
    ids=str,
)
def test_bad_input_gets_one_clear_line(
    arguments: tuple[object, ...], words: list[str], generate: Any
) -> None:
    outcome = generate(*arguments)
    assert outcome.is_refusal(*words), outcome


def test_an_unknown_preset_lists_the_presets() -> None:
    assert d3d("generate", "--prompt", "x", "--model", "gpt9").is_refusal(
        "no model 'gpt9'", "the presets are", "smollm2-135m", "smollm2-135m-fast"
    )


def test_plain_mode_and_a_drafter_contradict_each_other(
    tiny_target: Path, tiny_drafter: Path
) -> None:
    outcome = d3d(
        "generate",
        "--prompt",
        "x",
        "--target",
        tiny_target,
        "--drafter",
        tiny_drafter,
        "--mode",
        "plain",
    )
    assert outcome.is_refusal("--method plain uses no drafter")


def test_serial_without_a_drafter_is_refused_before_the_target_is_read(
    tiny_target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("d3d.loader.open_model", None)
    assert d3d("generate", "--prompt", "x", "--target", tiny_target, "--mode", "serial").is_refusal(
        "needs a drafter", "--drafter"
    )


@pytest.mark.parametrize("prompt", ["", "   "])
def test_an_empty_prompt(prompt: str, generate: Any) -> None:
    assert generate(prompt=prompt).is_refusal("prompt: it is empty")


def test_empty_standard_input_and_one_that_is_no_text(generate: Any) -> None:
    assert generate(prompt="-", stdin="\n").is_refusal("prompt: it is empty")
    assert generate(prompt="-", stdin=b"\xff\xfe").is_refusal("standard input is not UTF-8")


def test_a_prompt_longer_than_the_context(generate: Any) -> None:
    assert generate(prompt="the cat " * 300).is_refusal(
        "leave no room for an answer in a context of 256"
    )


def test_an_unknown_flag_is_named() -> None:
    outcome = d3d("generate", "--prompt", "x", "--no-such-flag")
    assert outcome.code == 2
    assert outcome.out == ""
    assert "No such option: --no-such-flag" in ANSI.sub("", outcome.err)


def test_damaged_and_foreign_checkpoints(
    generate: Any, tiny_target: Path, tiny_drafter: Path, tmp_path: Path
) -> None:
    cut = Path(shutil.copytree(tiny_target, tmp_path / "cut"))
    (cut / "model.safetensors").write_bytes((tiny_target / "model.safetensors").read_bytes()[:-100])
    assert generate("--target", cut).is_refusal("model.safetensors is damaged", "fetch it again")
    assert generate("--drafter", tiny_target).is_refusal(
        "is not a d3d drafter but a plain llama model"
    )
    (tmp_path / "empty").mkdir()
    assert generate("--target", tmp_path / "empty").is_refusal("holds no config.json")
    assert generate("--drafter", tmp_path / "empty").is_refusal("is not a drafter")
    lacking = Path(shutil.copytree(tiny_drafter, tmp_path / "lacking"))
    tensors = load_file(lacking / "model.safetensors")
    del tensors["mask_vector"]
    save_file(tensors, lacking / "model.safetensors")
    assert generate("--drafter", lacking).is_refusal("lacks mask_vector")
    assert generate("--target", tiny_drafter).is_refusal(
        "is a d3d drafter, which can't be a target"
    )


def test_a_drafter_of_another_tokenizer(generate: Any, tmp_path: Path) -> None:
    other = write_tiny_target(tmp_path / "other", texts=["quite another text"] * 4)
    drafter = write_tiny_drafter(tmp_path / "d", other)
    assert generate("--drafter", drafter).is_refusal(
        "another tokenizer", "token id", "in the first", "in the second"
    )


def test_warnings_of_a_failing_drafter_reach_standard_error_and_the_record(
    generate: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no [red]memory[/red]")

    plain = ids(generate("--json", "--mode", "plain"))
    monkeypatch.setattr("d3d.methods.serial.denoise.BlockDenoiser.draft", fail)
    outcome = generate("--json")
    assert ids(outcome) == plain
    assert "warning: drafting stopped" in outcome.err
    assert "no [red]memory[/red]" in outcome.err
    assert len(outcome.record["warnings"]) == 1


# The real command


@pytest.mark.slow
def test_the_real_command_streams_to_a_pipe(
    tiny_target: Path, tiny_drafter: Path, tmp_path: Path
) -> None:
    command = [
        sys.executable,
        "-m",
        "d3d.cli.app",
        "generate",
        "--target",
        str(tiny_target),
        "--drafter",
        str(tiny_drafter),
    ]
    result = subprocess.run(
        [*command, "--prompt", "-", "--max-tokens", "8", "--dtype", "float32", "--json"],
        input="hello\n",
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert len(json.loads(result.stdout.splitlines()[-1])["token_ids"]) == 8


@pytest.mark.parametrize("option", ["--model", "--target", "--drafter"])
def test_an_empty_name_is_refused(option: str) -> None:
    assert d3d("generate", "--prompt", "hello", option, "").is_refusal(f"{option} is empty")
