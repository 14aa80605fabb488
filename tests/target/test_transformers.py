"""A model that `transformers` runs is a target like our own: same ids, any drafter, any batch; what
can't be rewound is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import d3d
from d3d.engine.drafter import NO_DRAFT, Draft
from d3d.errors import InvalidCheckpoint, InvalidRequest
from d3d.methods.draft_model.drafter import DraftModelDrafter
from d3d.methods.ngram.drafter import NgramDrafter
from d3d.target.native import NativeTarget
from d3d.target.transformers import TransformersModel, TransformersTarget, open_transformers
from support.command import d3d as command
from support.doubles import always_wrong, oracle
from support.runs import SAMPLING, make, run, run_all
from support.tiny_model import open_tiny, tiny_tokenizer, write_tiny_drafter, write_tiny_target

PROMPTS = [[5, 17, 80, 3, 41], [9], [7, 7, 20, 31, 7, 7, 20, 31, 7], [60, 61, 62]]
SMALL = {"vocab_size": 302, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 2}
LAYERS = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def write(path: Path, config: Any) -> Path:
    """A model directory of any kind, with random weights."""
    torch.manual_seed(0)
    with torch.no_grad():
        model = transformers.AutoModelForCausalLM.from_config(config)
        for parameter in model.parameters():
            parameter.normal_(0, 0.15)
    model.save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A family that our own decoder does not know."""
    config = transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=64, **SMALL)
    return write(tmp_path_factory.mktemp("gpt2") / "model", config)


def engine(path: Path) -> TransformersTarget:
    return TransformersTarget(open_transformers(str(path), device="cpu", dtype="float32"))


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_ids_are_those_of_our_own_engine(tmp_path: Path, family: str) -> None:
    path = write_tiny_target(tmp_path / family, family=family)
    native, other = NativeTarget(open_tiny(path).transformer), engine(path)
    assert (other.vocab_size, other.max_length) == (native.vocab_size, native.max_length)
    for name in ("greedy", "everything"):
        options = {"max_tokens": 24, **SAMPLING[name]}
        plain = run(native, prompt=PROMPTS[2], **options).ids
        assert run(other, prompt=PROMPTS[2], **options).ids == plain
        assert run(other, NgramDrafter(16), PROMPTS[2], draft_length=4, **options).ids == plain


def test_logits_are_those_of_our_own_engine_after_every_rewind(tiny_target: Path) -> None:
    native, other = NativeTarget(open_tiny(tiny_target).transformer), engine(tiny_target)
    for feeds, lengths, last_only in (
        ({4: [5, 17, 80], 6: [50, 51], 9: [3]}, [2, 2, 1], False),
        ({9: [4, 9]}, [2, 2, 2], False),
        ({9: [7], 4: [1, 2, 3]}, [0, 2, 3], True),
        ({4: [8]}, [1, 2, 3], False),
        ({6: [52, 53], 9: [10]}, [1, 3, 4], False),
    ):
        ids = list(feeds)
        passes = native.forward(ids, [feeds[i] for i in ids], last_only=last_only)
        for sequence_id, rows in zip(ids, passes, strict=True):
            theirs = other.forward(sequence_id, feeds[sequence_id], last_only=last_only)
            assert theirs.dtype == torch.float32
            torch.testing.assert_close(rows.logits(), theirs, rtol=1e-4, atol=1e-4)
        for sequence_id, length in zip((4, 6, 9), lengths, strict=True):
            native.cache.crop(sequence_id, length)
            other.crop(sequence_id, length)
        assert [other.length(i) for i in (4, 6, 9)] == lengths
        assert [native.cache.length(i) for i in (4, 6, 9)] == lengths


def test_a_rewind_keeps_all_but_the_anchor_and_an_end_forgets_the_request(gpt2: Path) -> None:
    target = engine(gpt2)
    ending, staying = (make(target, prompt).request for prompt in PROMPTS[:2])
    for request in (ending, staying):
        target.forward(request.id, [*request.token_ids, 8, 9, 10])
    target.rewind([ending, staying])
    assert [target.length(request.id) for request in (ending, staying)] == [4, 0]
    target.rewind([ending])  # nothing is left to forget
    assert (target.length(ending.id), target.num_held) == (4, 2)
    whole = target.forward(-1, [*ending.token_ids, 20])
    draft = Draft((20,))
    verified, _ = target.verify([ending, staying], [draft, NO_DRAFT])
    torch.testing.assert_close(verified.logits(), whole[-2:], rtol=1e-4, atol=1e-4)
    for _ in range(2):  # harmless if it is gone already
        target.end(ending)
    assert target.length(ending.id) == 0
    assert (target.length(staying.id), target.num_held) == (1, 2)


def test_a_family_that_we_do_not_know_answers_as_generate_does(gpt2: Path) -> None:
    with pytest.raises(InvalidCheckpoint, match="'gpt2' is not supported"):
        d3d.load(str(gpt2), device="cpu", dtype="float32")
    model = d3d.load(str(gpt2), device="cpu", dtype="float32", backend="transformers")
    target = model.target
    assert isinstance(target, TransformersModel)
    expected = target.model.generate(
        torch.tensor([PROMPTS[0]]), max_new_tokens=20, do_sample=False, eos_token_id=None
    )[0, 5:].tolist()
    assert model.generate(PROMPTS[0], max_tokens=20, ignore_eos=True).token_ids == tuple(expected)
    for drafter in (
        oracle(6, [PROMPTS[0] + expected]),
        always_wrong(6, [PROMPTS[0] + expected], 302),
        NgramDrafter(16),
    ):
        assert (
            run(
                model.parts.target,
                drafter,
                PROMPTS[0],
                draft_length=6,
                max_tokens=20,
                ignore_eos=True,
            ).ids
            == expected
        )


def test_a_batch_is_each_of_its_requests_alone(gpt2: Path) -> None:
    target = engine(gpt2)
    alone = [
        run(target, prompt=prompt, max_tokens=4 + 5 * place).ids
        for place, prompt in enumerate(PROMPTS)
    ]
    for drafter in (
        None,
        NgramDrafter(16),
        oracle(5, [p + ids for p, ids in zip(PROMPTS, alone, strict=True)]),
    ):
        together = [
            make(target, prompt, max_tokens=4 + 5 * place) for place, prompt in enumerate(PROMPTS)
        ]
        assert [one.ids for one in run_all(target, drafter, together, 5)] == alone


def test_the_context_ends_where_the_model_says(gpt2: Path) -> None:
    target = engine(gpt2)
    assert target.max_length == 64
    found = run(target, NgramDrafter(16), [3] * 60, max_tokens=50, draft_length=8, ignore_eos=True)
    assert len(found.token_ids) == 64
    assert found.finish_reason == "length"


@pytest.mark.parametrize("pieces", [1, 7, 29, 30, 64])
def test_a_long_prompt_runs_in_pieces(
    gpt2: Path, pieces: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, prompt = engine(gpt2), list(range(3, 33))
    whole = target.forward(-1, prompt)
    in_pieces = [
        target.forward(-2, prompt[at : at + pieces]) for at in range(0, len(prompt), pieces)
    ]
    torch.testing.assert_close(torch.cat(in_pieces), whole, rtol=1e-4, atol=1e-4)
    fed: list[int] = []
    forward = target.forward

    def counted(request_id: int, ids: list[int], *, last_only: bool = False) -> torch.Tensor:
        fed.append(len(ids))
        return forward(request_id, ids, last_only=last_only)

    monkeypatch.setattr(target, "forward", counted)
    request = make(target, prompt).request
    last = None
    while last is None:
        (last,) = target.prefill([request], pieces)
    assert fed == [len(part) for part in in_pieces]
    assert max(fed) <= pieces
    torch.testing.assert_close(last.logits(), whole[-1:], rtol=1e-4, atol=1e-4)


def test_a_chunk_of_prompts_goes_to_the_first_of_them(gpt2: Path) -> None:
    target = engine(gpt2)
    requests = [make(target, prompt).request for prompt in (PROMPTS[0], PROMPTS[1], PROMPTS[2])]
    first = target.prefill(requests, 7)
    assert [rows is not None for rows in first] == [True, True, False]
    assert [target.length(request.id) for request in requests] == [5, 1, 1]
    (second,) = target.prefill(requests[2:], 7)
    assert second is None
    (third,) = target.prefill(requests[2:], 7)
    for request, rows in zip(requests, [*first[:2], third], strict=True):
        assert rows is not None
        alone = target.forward(-1 - request.id, request.token_ids, last_only=True)
        torch.testing.assert_close(rows.logits(), alone, rtol=1e-4, atol=1e-4)


def test_drafters_of_the_same_vocabulary_draft_for_it(
    tiny_target: Path, tiny_drafter: Path, tmp_path: Path
) -> None:
    native = d3d.load(str(tiny_target), tiny_drafter, device="cpu", dtype="float32")
    model = d3d.load(
        str(tiny_target), tiny_drafter, device="cpu", dtype="float32", backend="transformers"
    )
    assert model.target.fingerprint == native.target.fingerprint
    expected = native.generate("the cat sat", max_tokens=24, mode="plain")
    found = model.generate("the cat sat", max_tokens=24, mode="serial")
    assert found.token_ids == expected.token_ids
    assert found.speculation is not None
    assert found.speculation.rounds > 0
    assert found.speculation.warnings == ()
    twin = DraftModelDrafter(open_tiny(tiny_target).transformer, model.target.vocab_size, 5)
    assert (
        run(model.parts.target, twin, PROMPTS[0], draft_length=5, max_tokens=24).ids
        == run(native.parts.target, None, PROMPTS[0], max_tokens=24).ids
    )
    full = write_tiny_drafter(tmp_path / "full", tiny_target, scope=None)
    whole = d3d.load(str(tiny_target), full, device="cpu", dtype="float32", backend="transformers")
    assert whole.generate("the cat sat", max_tokens=24).token_ids == expected.token_ids


def test_a_drafter_of_another_vocabulary_is_refused(gpt2: Path, tmp_path: Path) -> None:
    other = write_tiny_target(tmp_path / "other", texts=["zigzag zebra zoo"] * 9)
    drafter = write_tiny_drafter(tmp_path / "drafter", other)
    with pytest.raises(InvalidCheckpoint, match="another tokenizer"):
        d3d.load(str(gpt2), drafter, device="cpu", dtype="float32", backend="transformers")


@pytest.mark.parametrize("mode", ["fused", "async"])
def test_modes_that_need_our_own_decoder_are_refused_by_name(
    tiny_target: Path, tiny_drafter: Path, mode: str
) -> None:
    model = d3d.load(
        str(tiny_target), tiny_drafter, device="cpu", dtype="float32", backend="transformers"
    )
    with pytest.raises(InvalidRequest, match=f"{mode} needs d3d's own decoder"):
        model.generate("hello", mode=mode)
    arguments = (
        "--prompt",
        "hello",
        "--target",
        tiny_target,
        "--drafter",
        tiny_drafter,
        "--backend",
        "transformers",
        "--mode",
        mode,
    )
    assert command("generate", *arguments).is_refusal(mode, "--backend")


SLIDING = {"sliding_window": 16, **LAYERS, **SMALL}
UNFIT = {
    "mistral": (transformers.MistralConfig(**SLIDING), "sliding-window"),
    "mamba": (
        transformers.MambaConfig(hidden_size=32, state_size=4, num_hidden_layers=2, vocab_size=302),
        "running state",
    ),
    "jamba": (
        transformers.JambaConfig(use_mamba_kernels=False, num_experts=2, **LAYERS, **SMALL),
        "running state",
    ),
    "gemma2": (transformers.Gemma2Config(head_dim=8, **SLIDING), "sliding-window"),
    "bart": (
        transformers.BartConfig(d_model=32, encoder_layers=1, decoder_layers=1, vocab_size=302),
        "encoder",
    ),
    "t5": (transformers.T5Config(d_model=32, num_layers=1, vocab_size=302), "encoder"),
    "bert": (
        transformers.BertConfig(
            hidden_size=32, num_hidden_layers=1, num_attention_heads=4, vocab_size=302
        ),
        "encoder",
    ),
    "clip": (transformers.CLIPConfig(), "no causal language model"),
}


@pytest.mark.parametrize("kind", UNFIT)
def test_what_cannot_be_rewound_is_refused_by_name_with_the_reason(
    kind: str, tmp_path: Path
) -> None:
    config, reason = UNFIT[kind]
    config.save_pretrained(tmp_path / kind)  # refused before any weight is read
    tiny_tokenizer().save_pretrained(tmp_path / kind)
    outcome = command(
        "generate",
        "--prompt",
        "x",
        "--target",
        tmp_path / kind,
        "--backend",
        "transformers",
        "--mode",
        "plain",
    )
    assert outcome.is_refusal(kind, reason), outcome.err


def test_a_cache_that_only_looks_as_if_it_could_be_cut_is_found_out(
    gpt2: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = TransformersTarget.crop

    def sloppy(target: TransformersTarget, request_id: int, length: int) -> None:
        real(target, request_id, length)
        layer: Any = target._caches[request_id].layers[0]
        layer.values = layer.values + 100.0

    monkeypatch.setattr(TransformersTarget, "crop", sloppy)
    with pytest.raises(InvalidCheckpoint, match=r"'gpt2'.*can't be rewound.*other logits"):
        engine(gpt2)


def test_missing_weights_are_not_made_up(gpt2: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    directory = tmp_path / "torn"
    directory.mkdir()
    for file in gpt2.iterdir():
        (directory / file.name).write_bytes(file.read_bytes())
    tensors = load_file(directory / "model.safetensors")
    gone = next(name for name in tensors if name.endswith("mlp.c_fc.weight"))
    save_file(
        {name: tensor for name, tensor in tensors.items() if name != gone},
        directory / "model.safetensors",
        {"format": "pt"},
    )
    with pytest.raises(InvalidCheckpoint, match=r"lacks 1 tensors.*c_fc"):
        open_transformers(str(directory), device="cpu", dtype="float32")


def test_the_command_line_takes_the_engine(
    tiny_target: Path, tiny_drafter: Path, tmp_path: Path
) -> None:
    model = (
        "--target",
        tiny_target,
        "--drafter",
        tiny_drafter,
        "--device",
        "cpu",
        "--dtype",
        "float32",
    )
    one = command(
        "generate",
        "--prompt",
        "the cat",
        "--max-tokens",
        12,
        "--json",
        "--backend",
        "transformers",
        *model,
    )
    assert one.code == 0, one.err
    assert (
        one.record["token_ids"]
        == command("generate", "--prompt", "the cat", "--max-tokens", 12, "--json", *model).record[
            "token_ids"
        ]
    )
    assert command("generate", "--prompt", "x", "--backend", "nope", *model).is_refusal(
        "native, c, transformers"
    )
    file = tmp_path / "mine.jsonl"
    file.write_text('{"prompt": "the cat"}\n')
    methods = (
        "--method",
        "serial",
        "--method",
        "lookup",
        "--method",
        "draft_model",
        "--backend",
        "transformers",
    )
    places = ("--set", file, "--max-tokens", 6, "--results", tmp_path)
    outcome = command("bench", "run", "foreign", *places, *methods, *model)
    assert outcome.code == 0, outcome.err
    rows = [
        json.loads(line)
        for line in (tmp_path / "foreign" / "results.jsonl").read_text().splitlines()
    ]
    assert {row["method"]: row["identity"] and row["identity"]["identical"] for row in rows} == {
        "plain": None,
        "serial": True,
        "ngram": True,
        "draft_model": True,
    }
    assert command("bench", "run", "foreign", *places, "--method", "lookup", *model).is_refusal(
        "another engine"
    )
    assert command(
        "bench", "run", "async", *places, "--method", "async", "--backend", "transformers", *model
    ).is_refusal("async")


def test_engine_is_an_alias_of_backend(gpt2: Path) -> None:
    places: Any = {"device": "cpu", "dtype": "float32"}
    assert d3d.load(str(gpt2), engine="transformers", **places).backend == "transformers"
    with pytest.raises(InvalidRequest, match="backend: 'transformers' and engine: 'native'"):
        d3d.load(str(gpt2), backend="transformers", engine="native", **places)
    for flag in ("--engine", "--backend"):
        options = ("--target", gpt2, flag, "transformers", "--device", "cpu", "--json")
        plan = command("generate", "--dry-run", "--prompt", "x", *options).record
        assert plan["target"]["backend"] == "transformers"
