"""A GGUF file becomes a Hugging Face directory: once, exactly, and whole or not at all."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType
from transformers import AutoModelForCausalLM

from d3d.errors import InvalidCheckpoint
from d3d.hub.cache import is_converted
from d3d.hub.names import resolve_model
from d3d.hub.open_model import eos_token_ids, load_config, load_tokenizer, read_tensors
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
