from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType
from safetensors.torch import save_file

from d3d.errors import InvalidCheckpoint, InvalidRequest
from d3d.hub.names import resolve_model
from d3d.hub.open_model import open_model, pick_device, pick_dtype, read_tensors
from support.tiny_gguf import write_tiny_gguf

CPU = torch.device("cpu")


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
