"""`d3d.load`, `generate` and `stream`, on a tiny model with a drafter of random deltas."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import d3d
from d3d import api, loader
from d3d.api import Model
from d3d.engine.round import Round
from d3d.errors import InvalidCheckpoint, InvalidRequest
from d3d.hub.checkpoint import save_drafter
from d3d.methods.costs import costs_journal, machine_costs, read_costs
from d3d.methods.fused.rows import BUDGETS
from d3d.results import HOPELESS_ROUNDS, Settings, speculation
from support.command import d3d as command
from support.tiny_model import open_tiny, random_drafter

SEEDED = {"temperature": 0.9, "seed": 11, "top_p": 0.95}
PENALTIES = {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "logit_bias": {40: 2.0}}


@pytest.fixture(scope="module")
def model(tiny_target: Path, tiny_drafter: Path) -> Model:
    return d3d.load(str(tiny_target), tiny_drafter, device="cpu", dtype="float32")


@pytest.fixture(scope="module")
def plain_model(tiny_target: Path) -> Model:
    return d3d.load(str(tiny_target), device="cpu", dtype="float32")


@pytest.mark.parametrize(
    "sampling",
    [{}, SEEDED, PENALTIES, SEEDED | PENALTIES],
    ids=["greedy", "seeded", "penalties", "all"],
)
@pytest.mark.parametrize(
    "drafting", [{}, {"draft_length": 1}, {"draft_length": 6, "num_denoise_steps": 3}], ids=str
)
def test_modes_give_equal_ids_and_text(
    model: Model, sampling: dict[str, Any], drafting: dict[str, int]
) -> None:
    plain = model.generate("how are you?", mode="plain", max_tokens=40, **sampling)
    serial = model.generate("how are you?", mode="serial", max_tokens=40, **drafting, **sampling)
    assert serial.token_ids == plain.token_ids
    assert serial.text == plain.text
    assert serial.finish_reason == plain.finish_reason
    assert serial.speculation is not None
    assert serial.speculation.rounds < len(serial.token_ids) - 1, (
        "the anchor's row is the target's own, so something is kept"
    )


@pytest.mark.parametrize(
    "sampling",
    [{}, SEEDED, PENALTIES, SEEDED | PENALTIES],
    ids=["greedy", "seeded", "penalties", "all"],
)
@pytest.mark.parametrize(
    "drafting", [{}, {"draft_length": 1}, {"draft_length": 5, "rows": 20}, {"rows": 2}], ids=str
)
def test_fused_mode_gives_plains_answer(
    model: Model, sampling: dict[str, Any], drafting: dict[str, int]
) -> None:
    asked: dict[str, Any] = {"max_tokens": 40, "logprobs": 2, "stop": ("zz",), **sampling}
    plain = model.generate("how are you?", mode="plain", **asked)
    fused = model.generate("how are you?", mode="fused", **drafting, **asked)
    assert fused.token_ids == plain.token_ids
    assert fused.text == plain.text
    assert fused.finish_reason == plain.finish_reason
    assert [entry.token_id for entry in fused.logprobs] == [
        entry.token_id for entry in plain.logprobs
    ]
    for one, other in zip(fused.logprobs, plain.logprobs, strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
    assert fused.speculation is not None
    assert fused.speculation.mode == "fused"
    assert fused.speculation.undrafted_rounds >= 1, "the first round has nothing to verify yet"
    assert fused.speculation.to_dict()["undrafted_rounds"] == fused.speculation.undrafted_rounds


def test_what_a_pass_costs_is_measured_once_for_each_machine(
    tiny_target: Path, tiny_drafter: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fused = {"mode": "fused", "max_tokens": 4}
    first = d3d.load(str(tiny_target), tiny_drafter, device="cpu", dtype="float32")
    first.generate("hello", **fused)
    costs = machine_costs(first.parts)
    assert costs.get("fused_rows") in BUDGETS
    assert costs.get("row_price") >= 0
    for name in ("best_rows", "row_price"):
        monkeypatch.setattr(
            f"d3d.methods.fused.rows.{name}", lambda *_: pytest.fail("measured again")
        )
    again = d3d.load(str(tiny_target), tiny_drafter, device="cpu", dtype="float32")
    again.generate("hello", **fused)
    entries = read_costs(costs_journal())
    assert [set(entry) - {"date", "measured_on"} for entry in entries] == [
        {"row_price"},
        {"fused_rows"},
    ]
    assert entries[0]["measured_on"]["dtype"] == "float32"
    assert entries[0]["measured_on"]["threads"] == torch.get_num_threads()


def test_another_seed_gives_another_answer_and_a_drawn_seed_repeats_it(model: Model) -> None:
    first = model.generate("hello", temperature=1.0, max_tokens=24)
    assert first.seed is not None
    assert (
        model.generate("hello", temperature=1.0, max_tokens=24, seed=first.seed).token_ids
        == first.token_ids
    )
    assert (
        model.generate("hello", temperature=1.0, max_tokens=24, seed=first.seed + 1).token_ids
        != first.token_ids
    )


def test_a_greedy_answer_has_no_seed(model: Model) -> None:
    assert model.generate("hello", max_tokens=2, seed=5).seed is None


@pytest.mark.parametrize("mode", ["plain", "serial", "fused"])
def test_chunks_join_to_the_result(model: Model, mode: str) -> None:
    chunks = list(model.stream("hello", mode=mode, max_tokens=30))
    result = chunks[-1].result
    assert result is not None
    assert all(chunk.result is None for chunk in chunks[:-1])
    assert "".join(chunk.text for chunk in chunks) == result.text
    assert tuple(token_id for chunk in chunks for token_id in chunk.token_ids) == result.token_ids
    drafted = [
        place < chunk.num_accepted for chunk in chunks for place in range(len(chunk.token_ids))
    ]
    assert tuple(drafted) == result.drafted
    assert len(chunks[0].token_ids) == 1, "the first token comes at once"


def test_the_default_mode_is_serial_with_a_drafter_and_plain_without(
    model: Model, plain_model: Model
) -> None:
    with_drafter = model.generate("hello", max_tokens=4)
    assert with_drafter.speculation is not None
    assert with_drafter.speculation.mode == "serial"
    assert plain_model.generate("hello", max_tokens=4).speculation is None


def test_options_without_a_method_are_for_the_usual_one_or_refused(
    tiny_target: Path, tiny_drafter: Path
) -> None:
    asked: Any = {"dtype": "float32", "speculative_config": {"num_speculative_tokens": 3}}
    config = d3d.load(str(tiny_target), tiny_drafter, **asked).config()
    assert (config.method, config.max_draft_length) == ("serial", 3)
    config = d3d.load(str(tiny_target), draft_model=str(tiny_target), **asked).config()
    assert (config.method, config.max_draft_length) == ("draft_model", 3)
    with pytest.raises(InvalidRequest, match="draft_length: method plain has no such option"):
        d3d.load(str(tiny_target), **asked)


def test_options_of_load_go_over_those_of_a_preset_file(
    tiny_target: Path, tiny_drafter: Path, tmp_path: Path
) -> None:
    fields = {
        "target": str(tiny_target),
        "drafter": str(tiny_drafter),
        "mode": "async",
        "outcomes": 2,
    }
    file = tmp_path / "preset.json"
    file.write_text(json.dumps(fields))
    config = d3d.load(str(file), dtype="float32", speculative_config={"draft_length": 3}).config()
    assert config.model_dump(exclude_none=True) == {
        "method": "async",
        "draft_length": 3,
        "outcomes": 2,
    }
    model = d3d.load(str(file), dtype="float32", draft_model=str(tiny_target))
    assert model.default_method == "draft_model"


def test_a_model_without_a_method_drafts_by_its_kind(tiny_target: Path, tiny_drafter: Path) -> None:
    for drafter, method in ((tiny_target, "draft_model"), (tiny_drafter, "serial")):
        asked = {"model": str(drafter), "num_speculative_tokens": 3}
        config = d3d.load(str(tiny_target), dtype="float32", speculative_config=asked).config()
        assert (config.method, config.max_draft_length) == (method, 3)
        options = ("--model", tiny_target, "--speculative-config", json.dumps(asked))
        plan = command("generate", "--dry-run", "--json", "--prompt", "hello", *options).record
        assert plan["mode"] == method


def test_plain_mode_loads_no_drafter_at_all(tiny_target: Path) -> None:
    assert d3d.load(str(tiny_target), plain=True, dtype="float32").drafter is None


def test_result_is_typed_and_has_the_documented_shape(model: Model) -> None:
    result = model.generate("hello", max_tokens=20)
    record = json.loads(json.dumps(result.to_dict()))
    assert record.keys() == {"text", "token_ids", "finish_reason", "usage", "timing", "speculation"}
    assert record["usage"] == {
        "prompt_tokens": len(model.encode("hello")),
        "completion_tokens": len(result.token_ids),
    }
    assert record["timing"].keys() == {"ttft_s", "tpot_s", "tokens_per_s"}
    assert record["speculation"].keys() == {
        "mode",
        "rounds",
        "acceptance_length",
        "acceptance_rate",
        "acceptance_at",
        "num_accepted_histogram",
    }
    assert tuple(record["token_ids"]) == result.token_ids
    with pytest.raises(dataclasses.FrozenInstanceError):
        result.text = ""  # type: ignore[misc]


def test_what_was_asked_for_besides_is_in_the_record_too(model: Model) -> None:
    record = json.loads(
        json.dumps(
            model.generate(
                "hello", max_tokens=3, temperature=1.0, seed=4, logprobs=2, thinking=False
            ).to_dict()
        )
    )
    assert record["seed"] == 4
    assert record["thinking"] is False
    assert [entry["token_id"] for entry in record["logprobs"]] == record["token_ids"]
    for entry in record["logprobs"]:
        best = [logprob for _, logprob in entry["top"]]
        assert best == sorted(best, reverse=True)
        assert [entry["token_id"], entry["logprob"]] in entry["top"][:2] + entry["top"][-1:], (
            "the token itself, then, if it is not among the two"
        )
        assert entry["logprob"] <= 0


def test_speculation_is_null_in_plain_mode(model: Model) -> None:
    assert model.generate("hello", mode="plain", max_tokens=3).to_dict()["speculation"] is None


def test_figures_of_rounds_add_up(model: Model) -> None:
    result = model.generate("how much is two and two?", max_tokens=60, draft_length=4)
    spec = result.speculation
    assert spec is not None
    assert spec.acceptance_length == pytest.approx((len(result.token_ids) - 1) / spec.rounds), (
        "the first token belongs to no round"
    )
    assert len(spec.num_accepted_histogram) == 5
    assert len(spec.acceptance_at) == 4
    assert sum(spec.num_accepted_histogram) == spec.rounds
    assert sum(result.drafted) == sum(
        kept * count for kept, count in enumerate(spec.num_accepted_histogram)
    )
    assert spec.acceptance_at == tuple(
        sum(spec.num_accepted_histogram[j:]) / spec.rounds for j in range(1, 5)
    )


def test_rates_count_what_was_really_drafted() -> None:
    rounds = [
        Round(4, 4, 5, 0, 0),
        Round(4, 1, 2, 0, 0),
        Round(2, 0, 1, 0, 0),
        Round(0, 0, 1, 0, 0),
    ]
    spec = speculation(Settings("serial", 4), rounds)
    assert spec.acceptance_rate == 5 / 10
    assert spec.acceptance_length == 9 / 4
    assert spec.acceptance_at == (0.5, 0.25, 0.25, 0.25)
    assert spec.num_accepted_histogram == (2, 1, 0, 0, 1)


def test_no_rounds_give_zeros_not_nan() -> None:
    spec = speculation(Settings("serial", 2), [])
    assert (spec.rounds, spec.acceptance_length, spec.acceptance_rate) == (0, 0.0, 0.0)
    assert spec.acceptance_at == (0.0, 0.0)
    assert spec.num_accepted_histogram == (0, 0, 0)


def test_one_token_takes_no_round_and_has_no_time_per_further_token(model: Model) -> None:
    result = model.generate("hello", max_tokens=1)
    assert len(result.token_ids) == 1
    assert result.timing.tpot_s is None
    assert result.speculation is not None
    assert result.speculation.rounds == 0
    json.dumps(result.to_dict(), allow_nan=False)


def test_times_fit_together(model: Model) -> None:
    timing = model.generate("hello", max_tokens=20).timing
    assert timing.tpot_s is not None
    assert timing.ttft_s > 0
    assert 20 / timing.tokens_per_s == pytest.approx(timing.ttft_s + 19 * timing.tpot_s)


def test_the_clock_starts_with_the_first_chunk(model: Model) -> None:
    import time

    chunks = model.stream("hello", max_tokens=1)
    time.sleep(0.3)
    result = list(chunks)[-1].result
    assert result is not None
    assert result.timing.ttft_s < 0.3


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"temprature": 1.0}, "temprature: there is no such key; there are: temperature"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"stop": ("",)}, "stop.0"),
        ({"min_tokens": 9, "max_tokens": 4}, "min_tokens (9) must not be above max_tokens (4)"),
        ({"logit_bias": {5000: 1.0}}, "logit_bias: token id 5000"),
        ({"stop_token_ids": (5000,)}, "stop_token_ids: token id 5000"),
        ({"mode": "turbo"}, "method: 'turbo' is not one of plain, serial, fused"),
        (
            {"draft_length": 7},
            "draft_length: 7 is not within 1 and the most that the drafter can draft, 6",
        ),
        ({"draft_length": 0}, "draft_length: 0 should be greater than or equal to 1"),
        ({"num_denoise_steps": 0}, "num_denoise_steps: 0 should be greater"),
        (
            {"num_denoise_steps": 5, "draft_length": 4},
            "num_denoise_steps: 5 is not within 1 and the draft length, 4",
        ),
        ({"mode": "plain", "draft_length": 4}, "draft_length: method plain has no such option"),
        (
            {"mode": "plain", "num_denoise_steps": 1},
            "num_denoise_steps: method plain has no such option",
        ),
        (
            {"mode": "async", "lookup": 2},
            "lookup: method async has no such option; leave it out, or use serial, fused or auto",
        ),
        ({"mode": "fused", "lookup": 40}, "lookup: 40"),
        ({"mode": "async", "least_kept": 0.5}, "least_kept: method async has no such option"),
        ({"lookup": -1}, "lookup: -1"),
        ({"lookup": 2.5}, "lookup: 2.5 should be a valid integer"),
        ({"lookup": True}, "lookup: True should be a valid integer"),
        ({"least_kept": "x"}, "least_kept: 'x' should be a valid number"),
        ({"mode": "fused", "rows": 2.5}, "rows: 2.5 should be a valid integer"),
        ({"lookup": 33}, "lookup: 33"),
        ({"least_kept": -0.5}, "least_kept: -0.5"),
        ({"least_kept": float("nan")}, "least_kept: nan"),
        ({"least_kept": float("inf")}, "least_kept: inf"),
        (
            {"mode": "fused", "num_denoise_steps": 1},
            "num_denoise_steps: method fused has no such option",
        ),
        ({"mode": "serial", "rows": 8}, "rows: method serial has no such option"),
        ({"mode": "fused", "rows": 1}, "rows: 1 should be greater than or equal to 2"),
        (
            {"mode": "fused", "draft_length": 6},
            "draft_length: 6 is not within 1 and 5: slots draft 5 tokens at most",
        ),
        ({"raw": True, "thinking": True}, "thinking"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_an_impossible_request_is_refused_by_name_before_anything_runs(
    model: Model, options: dict[str, Any], names: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        model.stream("hello", **options)
    assert str(caught.value).startswith(names)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "prompt: it is empty"),
        ("  \n", "prompt: it is empty"),
        ([], "prompt: it is empty"),
        ("\ud800", "prompt: it is not valid Unicode"),
        (None, "prompt: give text"),
        (["hello"], "prompt: a list holds"),
        ([1, 99999], "prompt: token id 99999"),
        ([{"role": "user", "content": None}], "message 1"),
        ([{"role": "user", "content": "a"}, {"content": "b"}], "message 2"),
        (
            list(range(3, 250)) * 2,
            "prompt: 494 tokens leave no room for an answer in a context of 256",
        ),
    ],
    ids=lambda value: str(value)[:30],
)
def test_an_impossible_prompt_is_refused(model: Model, prompt: Any, message: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        model.stream(prompt)
    assert str(caught.value).startswith(message)


def test_a_prompt_that_fills_the_context_but_one_place_gets_one_token(model: Model) -> None:
    prompt = [5 + index % 200 for index in range(255)]
    result = model.generate(prompt)
    assert len(result.token_ids) == 1
    assert result.finish_reason == "length"


def test_serial_needs_a_drafter(plain_model: Model) -> None:
    with pytest.raises(InvalidRequest, match="needs a drafter"):
        plain_model.generate("hello", mode="serial")


@pytest.mark.parametrize("method", ["serial", "async", "fused", "draft_model"])
def test_a_method_without_its_drafter_is_refused_before_anything_is_loaded(
    method: str, tiny_target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader, "open_model", None)
    with pytest.raises(InvalidRequest, match=f"method: {method} needs a drafter"):
        d3d.load(str(tiny_target), speculative_config={"method": method})


def test_a_drafter_and_a_draft_model_are_one_too_many(tiny_target: Path) -> None:
    with pytest.raises(InvalidRequest, match="draft_model: small and the drafter big are both"):
        d3d.load(str(tiny_target), "big", draft_model="small")


def test_methods_that_were_not_used_for_longest_are_forgotten_if_idle(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api, "MOST_BUILT", 3)
    expected = model.generate("hello", max_tokens=12).token_ids
    begun = model.add("hello", method="serial", draft_length=1, max_tokens=12)
    model.step()
    for length in (2, 3, 4, 2, 5):
        asked = {"method": "serial", "draft_length": length}
        assert model.generate("hello", max_tokens=12, **asked).token_ids == expected
    assert len(model._built) == len(model._steppers) == 3
    kept = [config.max_draft_length for config in model._built]
    assert kept == [1, 2, 5], "one is at work, the others were used last"
    assert begun.result().token_ids == expected
    model.close()
    assert begun.finished


def test_options_without_a_method_are_those_of_a_preset_files_method(
    tiny_target: Path, tiny_drafter: Path, tmp_path: Path
) -> None:
    fields = {"target": str(tiny_target), "drafter": str(tiny_drafter)}
    file = tmp_path / "preset.json"
    file.write_text(json.dumps({**fields, "mode": "fused", "lookup": 2}))
    model = d3d.load(str(file), device="cpu", speculative_config={"num_speculative_tokens": 3})
    config = model.config()
    assert (config.method, config.max_draft_length) == ("fused", 3)
    assert config.model_dump()["lookup"] == 2


def test_plain_and_a_drafter_contradict_each_other(tiny_target: Path, tiny_drafter: Path) -> None:
    with pytest.raises(InvalidRequest, match="leave the drafter out"):
        d3d.load(str(tiny_target), tiny_drafter, plain=True)


def test_a_foreign_drafter_is_refused_before_the_target_is_read(tiny_target: Path) -> None:
    with pytest.raises(InvalidCheckpoint, match="not a d3d drafter but a plain llama model"):
        d3d.load("/no/such/target", tiny_target)


def test_prompts_of_every_kind(model: Model) -> None:
    ids = model.encode("hello")
    text = model.tokenizer.decode(ids)
    assert text == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    assert model.encode([{"role": "user", "content": "hello"}]) == ids
    assert model.encode(ids) == ids
    assert model.encode("hello", raw=True) == model.tokenizer.encode("hello")
    assert model.encode(" ", raw=True), "white space is text where the prompt is taken as it is"
    system = model.encode(
        [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]
    )
    assert model.tokenizer.decode(system).startswith("<|im_start|>system\nbe brief<|im_end|>")


def test_thinking_reaches_the_template_and_the_result(model: Model) -> None:
    ends = {
        switch: model.tokenizer.decode(model.encode("hello", thinking=switch)).split("assistant\n")[
            1
        ]
        for switch in (None, True, False)
    }
    assert ends == {None: "", True: "<think>", False: "<think></think>"}
    assert model.generate("hello", thinking=True, max_tokens=1).thinking is True
    assert model.generate("hello", max_tokens=1).thinking is None


def test_a_model_without_a_template_wants_raw_prompts(tiny_target: Path, tmp_path: Path) -> None:
    import shutil

    copy = tmp_path / "bare"
    shutil.copytree(tiny_target, copy)
    (copy / "chat_template.jinja").unlink()
    bare = d3d.load(str(copy), dtype="float32")
    with pytest.raises(InvalidRequest, match="--raw"):
        bare.generate("hello")
    assert bare.generate("hello", raw=True, max_tokens=2).usage.completion_tokens == 2


def test_a_template_that_refuses_gives_its_own_reason(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        model.tokenizer, "chat_template", "{{ raise_exception('no system role here') }}"
    )
    with pytest.raises(InvalidRequest, match="no system role here"):
        model.encode("hello")


def test_a_drafter_that_fails_gives_the_same_answer_and_a_warning(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no [bold] memory")

    plain = model.generate("hello", mode="plain", max_tokens=20)
    monkeypatch.setattr("d3d.methods.serial.denoise.BlockDenoiser.draft", fail)
    result = model.generate("hello", max_tokens=20)
    assert result.token_ids == plain.token_ids
    assert result.speculation is not None
    (warning,) = result.speculation.warnings
    assert "no [bold] memory" in warning
    assert "decoded plainly" in warning
    assert result.to_dict()["warnings"] == [warning]


def test_a_drafter_that_is_never_right_is_named_hopeless() -> None:
    wrong = [Round(4, 0, 1, 0, 0)] * HOPELESS_ROUNDS
    assert speculation(Settings("serial", 4), wrong[1:]).warnings == ()
    (warning,) = speculation(Settings("serial", 4), wrong).warnings
    assert "does not fit the target" in warning
    assert speculation(Settings("serial", 4), [*wrong, Round(4, 1, 2, 0, 0)]).warnings == ()


def test_importing_d3d_does_not_import_torch() -> None:
    script = """
import sys, d3d
d3d.__all__
print(sorted({'torch', 'transformers'} & sys.modules.keys()))
d3d.load
print('torch' in sys.modules)
"""
    output = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    ).stdout
    assert output.split("\n")[:2] == ["[]", "True"]
    with pytest.raises(AttributeError, match="nonsense"):
        _ = d3d.nonsense  # type: ignore[attr-defined]


def test_drafters_of_other_draft_ids_have_other_fingerprints(
    tiny_target: Path, tmp_path: Path
) -> None:
    base, found = open_tiny(tiny_target), []
    for name, ids in (
        ("one", range(7, 247, 6)),
        ("again", range(7, 247, 6)),
        ("other", range(8, 248, 6)),
    ):
        drafter = random_drafter(base, draft_vocabulary=40)
        drafter.set_draft_ids(torch.tensor(ids))
        save_drafter(tmp_path / name, drafter, base)
        found.append(
            d3d.load(
                str(tiny_target), tmp_path / name, device="cpu", dtype="float32"
            ).drafter_fingerprint
        )
    assert found[0] == found[1] != found[2]
