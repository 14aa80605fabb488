"""Tiny random models with the structure of the real families, for tests that need no
checkpoint."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from d3d.hub.open_model import tensor_shapes
from d3d.model.config import FAMILIES, decoder_config
from d3d.model.transformer import Transformer

if TYPE_CHECKING:
    from transformers import PretrainedConfig

EMBEDDING_STD = 0.25
"""Small beside the layers' outputs, so that the next token depends on the context and not on the
last token alone."""


def tiny_config(family: str = "llama", **overrides: Any) -> PretrainedConfig:
    """A `transformers` config: 2 layers, hidden size 64, 4 query and 2 key-value heads of 16, 97
    tokens, 512 positions.

    `family`: llama, qwen2 or qwen3; `overrides`: fields of that family's config. Raises ValueError
    for another family."""
    from transformers import AutoConfig

    if family not in FAMILIES:
        raise ValueError(f"family must be one of {', '.join(FAMILIES)}, not {family!r}")
    fields: dict[str, Any] = {
        "vocab_size": 97,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    config: PretrainedConfig = AutoConfig.for_model(family, **{**fields, **overrides})
    return config


def tiny_tensors(config: PretrainedConfig, seed: int = 0, scale: float = 1.0) -> dict[str, Tensor]:
    """Random float32 tensors under their Hugging Face names, with greedy continuations that vary
    instead of repeating one token.

    `scale` multiplies the layers' matrices: the larger, the more each token changes what
    follows."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: _random(name, shape, generator, scale)
        for name, shape in tensor_shapes(config).items()
    }


def _random(name: str, shape: torch.Size, generator: torch.Generator, scale: float) -> Tensor:
    noise = torch.randn(shape, generator=generator)
    if name.endswith("norm.weight"):
        return 1 + 0.1 * noise
    if name in ("model.embed_tokens.weight", "lm_head.weight"):
        return EMBEDDING_STD * noise
    if name.endswith(".bias"):
        return 0.1 * noise
    return noise * (2.0 * scale * math.sqrt(1 / shape[1]))


def tiny_transformer(
    family: str = "llama", *, seed: int = 0, scale: float = 1.0, **overrides: Any
) -> Transformer:
    """A `Transformer` of `tiny_config` and `tiny_tensors`, float32 on the CPU."""
    config = tiny_config(family, **overrides)
    return Transformer(decoder_config(config), tiny_tensors(config, seed, scale)).eval()
