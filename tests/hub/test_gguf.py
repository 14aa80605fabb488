"""A GGUF file becomes a Hugging Face directory: once, exactly, and whole or not at all."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from d3d.errors import InvalidCheckpoint
from d3d.hub.cache import is_converted
from d3d.hub.names import resolve_model
from d3d.hub.open_model import eos_token_ids, load_config, load_tokenizer, read_tensors
from d3d.model.config import decoder_config
from support.tiny_gguf import TinyGguf, write_tiny_gguf

TEXTS = [
    "year 1234567 x  = foo(12)\n\n    return 99",
    "x  12\n    1 + 2",
    "héllo 🎉 日本",
    "  two  spaces ",
    "can't won't . , !",
    "\t\r\n",
]


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        ("F32", torch.float32),
        ("F16", torch.float16),
        ("BF16", torch.bfloat16),
        ("Q8_0", torch.float32),
        ("Q4_1", torch.float32),
    ],
)
def test_a_gguf_file_keeps_every_value_and_no_more_bits_than_needed(
    kind: str, dtype: torch.dtype, cache: Path, tmp_path: Path
) -> None:
    source = write_tiny_gguf(tmp_path / "tiny.gguf", GGMLQuantizationType[kind])
    tensors = read_tensors(resolve_model(str(source.path)))
    assert {tensor.dtype for tensor in tensors.values()} == {dtype}
    for name, values in source.values.items():
        assert torch.equal(tensors[name].float(), torch.from_numpy(values.copy())), name


def test_a_converted_directory_is_a_model_that_transformers_loads(gguf: TinyGguf) -> None:
    directory = resolve_model(str(gguf.path))
    assert "quantization_config" not in json.loads((directory / "config.json").read_text())
    model = AutoModelForCausalLM.from_pretrained(directory)
    assert set(read_tensors(directory)) <= set(model.state_dict())


def test_a_converted_tokenizer_splits_digits_and_gives_text_back(gguf: TinyGguf) -> None:
    tokenizer = load_tokenizer(resolve_model(str(gguf.path)))
    assert tokenizer.tokenize("x  12") == [
        "x",
        "ĠĠ",
        "1",
        "2",
    ]  # GPT-2's rule alone would cut the two spaces apart
    assert [tokenizer.decode(tokenizer.encode(text)) for text in TEXTS] == TEXTS


def test_an_unknown_rule_of_splitting_is_refused(cache: Path, tmp_path: Path) -> None:
    source = write_tiny_gguf(tmp_path / "tiny.gguf", GGMLQuantizationType.F16, pre="martian")
    with pytest.raises(InvalidCheckpoint, match="'martian'"):
        resolve_model(str(source.path))
    assert not list((cache / "converted").glob("[!.]*"))


def test_a_second_start_converts_nothing(
    gguf: TinyGguf, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first = resolve_model(str(gguf.path))
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err == "converting tiny.gguf, once\n"  # and nothing of the libraries' own
    monkeypatch.setattr("d3d.hub.gguf._read_model", None)
    started = time.monotonic()
    assert resolve_model(str(gguf.path)) == first
    assert time.monotonic() - started < 1
    assert capsys.readouterr().err == ""


def test_another_file_of_the_same_name_is_converted_on_its_own(gguf: TinyGguf) -> None:
    first = resolve_model(str(gguf.path))
    write_tiny_gguf(gguf.path, GGMLQuantizationType.F16)
    assert resolve_model(str(gguf.path)) != first


def test_a_damaged_conversion_is_made_again(gguf: TinyGguf) -> None:
    directory = resolve_model(str(gguf.path))
    weights = directory / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    assert len(read_tensors(resolve_model(str(gguf.path)))) == len(gguf.values) + 4


def test_a_cut_gguf_file_is_named_and_leaves_nothing(gguf: TinyGguf, cache: Path) -> None:
    content = gguf.path.read_bytes()
    for keep in (10, 3000, len(content) // 2):
        gguf.path.write_bytes(content[:keep])
        with pytest.raises(InvalidCheckpoint, match=r"tiny\.gguf can't be read"):
            resolve_model(str(gguf.path))
    assert not list((cache / "converted").glob("[!.]*"))


def test_two_conversions_at_once_give_one_whole_directory(gguf: TinyGguf, cache: Path) -> None:
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(resolve_model, [str(gguf.path)] * 2)
    assert first == second
    assert [path.name for path in (cache / "converted").glob("[!.]*")] == [first.name]
    assert is_converted(first, json.loads((first / "d3d_source.json").read_text())["sha256"])


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
GGUF_YARN = {"type": "yarn", "factor": 4.0, "original_context_length": 32}


def frequencies(**rope: Any) -> Tensor:
    """Those of transformers, for the tiny model."""
    config = LlamaConfig(
        hidden_size=64,
        num_attention_heads=4,
        max_position_embeddings=128,
        rope_parameters={"rope_theta": 10000.0, **rope},
    )
    rotary = LlamaRotaryEmbedding(config)
    return rotary.inv_freq * rotary.attention_scaling


def scaled(fields: dict[str, float | str], prefix: str = "rope.scaling.") -> dict[str, Any]:
    return {f"{prefix}{name}": value for name, value in fields.items()}


@pytest.mark.parametrize(
    ("fields", "rope"),
    [
        ({}, {"rope_type": "default"}),
        (scaled({"type": "none", "factor": 4.0}), {"rope_type": "default"}),
        (scaled({"type": "linear", "factor": 1.0}), {"rope_type": "default"}),
        (scaled({"type": "linear", "factor": 2.5}), {"rope_type": "linear", "factor": 2.5}),
        (scaled({"factor": 4.0}), {"rope_type": "linear", "factor": 4.0}),
        ({"rope.scale_linear": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        (scaled(GGUF_YARN), YARN),
        (
            scaled({**GGUF_YARN, "yarn_beta_fast": 16.0, "yarn_beta_slow": 2.0}),
            {**YARN, "beta_fast": 16.0, "beta_slow": 2.0},
        ),
        (
            scaled({"type": "yarn", "factor": 4.0, "yarn_ext_factor": 1.0}),
            {**YARN, "original_max_position_embeddings": 128},
        ),
    ],
    ids=str,
)
def test_scaled_rotary_frequencies_are_those_of_transformers(
    fields: dict[str, Any], rope: dict[str, Any], cache: Path, tmp_path: Path
) -> None:
    source = write_tiny_gguf(tmp_path / "tiny.gguf", GGMLQuantizationType.F16, fields=fields)
    config = decoder_config(load_config(resolve_model(str(source.path))))
    found = torch.tensor(config.inv_freq) * config.rope_scale
    assert torch.allclose(found, frequencies(**rope), rtol=0, atol=1e-6)


def test_rotary_divisors_as_of_llama_3_are_applied(cache: Path, tmp_path: Path) -> None:
    plain, wanted = frequencies(rope_type="default"), frequencies(**LLAMA3)
    assert not torch.allclose(plain, wanted, atol=1e-3)
    divisors = {"rope_freqs.weight": (plain / wanted).tolist()}
    source = write_tiny_gguf(tmp_path / "tiny.gguf", GGMLQuantizationType.F16, tensors=divisors)
    directory = resolve_model(str(source.path))
    config = decoder_config(load_config(directory))
    assert torch.allclose(torch.tensor(config.inv_freq), wanted, rtol=0, atol=1e-6)
    assert config.rope_scale == 1.0
    model = AutoModelForCausalLM.from_pretrained(directory)
    assert torch.allclose(model.model.rotary_emb.inv_freq, wanted, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"fields": scaled({"type": "martian", "factor": 2.0})}, "rotary scaling 'martian'"),
        ({"fields": scaled({"alpha": 1000.0})}, "rotary scaling 'linear' with alpha 1000"),
        ({"fields": {"rope.dimension_count": 8}}, "of 8 of a head's 16 numbers"),
        ({"fields": scaled({"type": "longrope", "factor": 2.0})}, "rotary scaling 'longrope'"),
        (
            {"fields": scaled({**GGUF_YARN, "yarn_attn_factor": 1.3})},
            r"rotary scaling 'yarn' with yarn_attn_factor 1\.29",
        ),
        ({"tensors": {"rope_factors_long.weight": [2.0] * 8}}, "'linear' with rope_factors_long"),
        (
            {"fields": scaled(GGUF_YARN), "tensors": {"rope_freqs.weight": [2.0] * 8}},
            "'yarn' with rope_freqs",
        ),
        ({"tensors": {"blk.0.attn_q.bias": [1.0] * 64}}, "no place .* blk.0.attn_q.bias"),
        ({"without": "blk.1.ffn_up"}, r"lacks tensors, for example model\.layers\.1\.mlp\.up_proj"),
    ],
    ids=str,
)
def test_what_would_be_computed_wrongly_is_refused_by_name(
    changes: dict[str, Any], message: str, cache: Path, tmp_path: Path
) -> None:
    source = write_tiny_gguf(tmp_path / "tiny.gguf", GGMLQuantizationType.F16, **changes)
    with pytest.raises(InvalidCheckpoint, match=message):
        resolve_model(str(source.path))


@pytest.mark.real_model
def test_the_real_model_loads_at_once_and_completes_a_sentence(smollm2: Path) -> None:
    started = time.monotonic()
    tensors = read_tensors(smollm2)
    assert time.monotonic() - started < 1
    assert sum(tensor.numel() for tensor in tensors.values()) == 134_515_008
    tokenizer = load_tokenizer(smollm2)
    assert [tokenizer.decode(tokenizer.encode(text)) for text in TEXTS] == TEXTS
    assert eos_token_ids(smollm2, load_config(smollm2), tokenizer) == {2}
    model = AutoModelForCausalLM.from_pretrained(smollm2)
    logits = model(torch.tensor([tokenizer.encode("The capital of France is")])).logits
    assert tokenizer.decode(int(logits[0, -1].argmax())) == " Paris"
