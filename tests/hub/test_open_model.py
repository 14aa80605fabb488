"""Config, tokenizer, end tokens and tensors of a directory, and the model opened from it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType
from safetensors.torch import save_file
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from d3d.errors import InvalidCheckpoint, InvalidRequest
from d3d.hub.names import resolve_model
from d3d.hub.open_model import (
    eos_token_ids,
    load_config,
    load_tokenizer,
    open_model,
    pick_device,
    pick_dtype,
    read_tensors,
)
from support.tiny_gguf import TinyGguf, write_tiny_gguf

CPU = torch.device("cpu")


def shards(directory: Path) -> list[Path]:
    return sorted(directory.glob("*.safetensors"))


def edit_json(file: Path, **changes: object) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


@pytest.fixture
def byte_tokenizer() -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.BPE({text: i for i, text in enumerate(alphabet)}, []))
    )


# Devices and dtypes


def pretend_cuda(monkeypatch: pytest.MonkeyPatch, devices: int) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: devices > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)


def test_auto_takes_cuda_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_cuda(monkeypatch, 0)
    assert pick_device("auto") == CPU
    pretend_cuda(monkeypatch, 2)
    assert pick_device("auto").type == "cuda"
    assert pick_device("cpu") == CPU
    assert pick_device("cuda:1") == torch.device("cuda:1")


@pytest.mark.parametrize("name", ["tpu", "cuda5", "mps", "", "cpu:x", "cuda:x", "cuda:-1"])
def test_what_is_no_device_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_cuda(monkeypatch, 2)
    with pytest.raises(InvalidRequest, match=f"device: '{name}' is not"):
        pick_device(name)


def test_a_device_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_cuda(monkeypatch, 0)
    with pytest.raises(InvalidRequest, match="no CUDA device is available here; use cpu or auto"):
        pick_device("cuda:0")
    pretend_cuda(monkeypatch, 2)
    with pytest.raises(InvalidRequest, match="cuda:2 is not there, this machine has 2"):
        pick_device("cuda:2")


@pytest.mark.parametrize(("supported", "dtype"), [(True, torch.bfloat16), (False, torch.float32)])
def test_auto_is_bfloat16_where_the_device_computes_in_it(
    supported: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: supported)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    assert pick_dtype("auto", CPU) == dtype


def test_a_dtype_is_taken_as_asked_or_refused() -> None:
    assert pick_dtype("float32", CPU) == torch.float32
    assert pick_dtype("bfloat16", CPU) == torch.bfloat16
    for name in ("float16", "int8", "", "Float32"):
        with pytest.raises(
            InvalidRequest, match=f"dtype: '{name}' is not supported; use auto, float32 or bfloat16"
        ):
            pick_dtype(name, CPU)


# Open models


@pytest.fixture
def directory(cache: Path, tmp_path: Path) -> Path:
    return resolve_model(
        str(write_tiny_gguf(tmp_path / "tiny.gguf", GGMLQuantizationType.F32).path)
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_directory_opens_in_the_wanted_dtype(dtype: str, directory: Path) -> None:
    model = open_model(str(directory), device="cpu", dtype=dtype)
    assert {parameter.dtype for parameter in model.transformer.parameters()} == {
        getattr(torch, dtype)
    }
    assert not any(parameter.requires_grad for parameter in model.transformer.parameters())
    assert model.path == directory
    assert model.config.vocab_size == model.transformer.embedding.shape[0]
    assert len(model.tokenizer) > 0


def test_the_fingerprint_is_of_the_weights_as_stored(directory: Path) -> None:
    first = open_model(str(directory), device="cpu", dtype="float32").fingerprint
    assert open_model(str(directory), device="cpu", dtype="bfloat16").fingerprint == first
    tensors = {name: tensor.clone() for name, tensor in read_tensors(directory).items()}
    tensors["model.norm.weight"][0] += 1
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    assert open_model(str(directory), device="cpu", dtype="float32").fingerprint != first


def test_weights_that_are_not_floats_are_refused_before_they_are_cast(directory: Path) -> None:
    tensors = {name: tensor.clone() for name, tensor in read_tensors(directory).items()}
    name = "model.layers.0.mlp.up_proj.weight"
    tensors[name] = tensors[name].to(torch.int8)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InvalidCheckpoint, match=rf"{name} holds torch\.int8"):
        open_model(str(directory), device="cpu", dtype="float32")


def test_a_wrong_device_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="device"):
        open_model(str(tmp_path / "nothing"), device="gpu")
    with pytest.raises(InvalidRequest, match="dtype"):
        open_model(str(tmp_path / "nothing"), device="cpu", dtype="half")


def test_a_config_at_odds_with_the_weights_is_refused(directory: Path) -> None:
    file = directory / "config.json"
    content = json.loads(file.read_text())
    file.write_text(json.dumps({**content, "intermediate_size": content["intermediate_size"] + 8}))
    with pytest.raises(InvalidCheckpoint, match=r"gate_proj\.weight has shape"):
        open_model(str(directory), device="cpu", dtype="float32")


# Tensors


@pytest.mark.parametrize("layout", ["single", "sharded"])
def test_all_tensors_are_read_as_they_were_saved(
    layout: str, tiny: LlamaForCausalLM, request: pytest.FixtureRequest
) -> None:
    tensors = read_tensors(request.getfixturevalue(layout))
    expected = tiny.state_dict()
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensors[name], expected[name]) for name in expected)


def test_a_missing_shard_is_named(sharded: Path) -> None:
    shards(sharded)[1].unlink()
    with pytest.raises(InvalidCheckpoint, match=r"model-00002-of.*missing"):
        read_tensors(sharded)


@pytest.mark.parametrize("keep", [4, 100, -10])
def test_a_file_cut_short_is_named(single: Path, keep: int) -> None:
    file = single / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(InvalidCheckpoint, match=r"model\.safetensors is damaged"):
        read_tensors(single)


def test_a_tensor_that_the_index_lacks_is_named(sharded: Path) -> None:
    index = sharded / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    weight_map.pop("model.norm.weight")
    edit_json(index, weight_map=weight_map)
    with pytest.raises(
        InvalidCheckpoint,
        match=r"names model\.norm\.weight, which model\.safetensors\.index\.json lacks",
    ):
        read_tensors(sharded)


def test_a_tensor_that_its_shard_lacks_is_named(sharded: Path) -> None:
    index = sharded / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    weight_map["model.extra.weight"] = shards(sharded)[0].name
    edit_json(index, weight_map=weight_map)
    with pytest.raises(
        InvalidCheckpoint, match=r"names model\.extra\.weight, which model-00001-of-.* lacks"
    ):
        read_tensors(sharded)


@pytest.mark.parametrize("content", ["{", "[]", "{}"])
def test_a_damaged_index_is_named(sharded: Path, content: str) -> None:
    (sharded / "model.safetensors.index.json").write_text(content)
    with pytest.raises(InvalidCheckpoint, match=r"index\.json"):
        read_tensors(sharded)


def test_weights_of_another_format_are_refused(single: Path) -> None:
    (single / "model.safetensors").rename(single / "pytorch_model.bin")
    with pytest.raises(InvalidCheckpoint, match="only safetensors"):
        read_tensors(single)


# Config, tokenizer, end tokens


def test_a_directory_is_taken_as_it_is(single: Path) -> None:
    assert resolve_model(str(single)) == single
    assert load_config(single).num_hidden_layers == 3


def test_a_damaged_config_is_named(single: Path) -> None:
    for content in ("{", "{}", '{"model_type": "no-such-family"}'):
        (single / "config.json").write_text(content)
        with pytest.raises(InvalidCheckpoint, match=r"config\.json"):
            load_config(single)


def test_a_directory_without_tokenizer_is_refused(single: Path) -> None:
    with pytest.raises(InvalidCheckpoint, match="tokenizer"):
        load_tokenizer(single)


def test_a_damaged_tokenizer_is_refused(gguf: TinyGguf) -> None:
    directory = resolve_model(str(gguf.path))
    (directory / "tokenizer.json").write_text('{"version": "1.0"')
    with pytest.raises(InvalidCheckpoint, match="tokenizer"):
        load_tokenizer(directory)


@pytest.mark.parametrize(
    ("named", "expected"), [([5, 6], {5, 6}), (7, {7}), (None, {2}), ([], {2})]
)
def test_end_tokens_are_the_generation_configs_or_else_the_configs(
    single: Path, named: object, expected: set[int], byte_tokenizer: PreTrainedTokenizerFast
) -> None:
    byte_tokenizer.eos_token = byte_tokenizer.convert_ids_to_tokens(3)
    edit_json(single / "generation_config.json", eos_token_id=named)
    assert eos_token_ids(single, load_config(single), byte_tokenizer) == expected


def test_the_tokenizers_end_token_counts_where_no_other_is_named(
    single: Path, byte_tokenizer: PreTrainedTokenizerFast
) -> None:
    (single / "generation_config.json").unlink()
    edit_json(single / "config.json", eos_token_id=None)
    assert eos_token_ids(single, load_config(single), byte_tokenizer) == frozenset()
    byte_tokenizer.eos_token = byte_tokenizer.convert_ids_to_tokens(3)
    assert eos_token_ids(single, load_config(single), byte_tokenizer) == {3}
