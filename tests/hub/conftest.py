"""Tiny models in the formats that the hub reads."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType
from transformers import LlamaConfig, LlamaForCausalLM

from support.tiny_gguf import TinyGguf, write_tiny_gguf


@pytest.fixture(scope="module")
def tiny() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        eos_token_id=2,
    )
    return LlamaForCausalLM(config)


@pytest.fixture
def single(tiny: LlamaForCausalLM, tmp_path: Path) -> Path:
    tiny.save_pretrained(tmp_path / "single")
    return tmp_path / "single"


@pytest.fixture
def sharded(tiny: LlamaForCausalLM, tmp_path: Path) -> Path:
    tiny.save_pretrained(tmp_path / "sharded", max_shard_size="20KB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 2
    return tmp_path / "sharded"


@pytest.fixture
def gguf(cache: Path, tmp_path: Path) -> TinyGguf:
    return write_tiny_gguf(tmp_path / "tiny.gguf", GGMLQuantizationType.Q8_0)
