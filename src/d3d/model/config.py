"""Shape of a Llama, Qwen2 or Qwen3 decoder, read from its `transformers` config."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from pydantic import BaseModel, Field
from torch import Tensor

from d3d.errors import InvalidCheckpoint

FAMILIES = ("llama", "qwen2", "qwen3")
ROPE_TYPES = ("default", "linear", "llama3", "yarn")


Size = Annotated[int, Field(strict=True, ge=1, le=1 << 24)]


class DecoderSizes(BaseModel):
    """Sizes in a config.json, bounded before anything is allocated by them. `transformers` checks
    the types of all fields, but no values."""

    vocab_size: Size | None = None
    hidden_size: Size | None = None
    intermediate_size: Size | None = None
    num_hidden_layers: Annotated[int, Field(strict=True, ge=1, le=4096)] | None = None
    num_attention_heads: Size | None = None
    num_key_value_heads: Size | None = None
    head_dim: Annotated[int, Field(strict=True, ge=2, le=1 << 16)] | None = None
    max_position_embeddings: Annotated[int, Field(strict=True, ge=1, le=1 << 40)] | None = None


@dataclass(frozen=True)
class DecoderConfig:
    """Shape of a decoder. Sizes in elements."""

    family: str
    vocab_size: int
    """Rows of the embedding and the head."""
    num_tokens: int
    """Ids from here on have no token: their rows only pad the matrices, and are never chosen."""
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    max_length: int
    tied: bool
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    inv_freq: tuple[float, ...]
    """Rotary frequencies, head_dim / 2 of them."""
    rope_scale: float
    """Factor on the rotary cosines and sines (YaRN, arXiv 2309.00071, section 3.4), else 1."""


def decoder_config(config: Any, num_tokens: int | None = None) -> DecoderConfig:
    """Shape of the decoder of a `transformers` config. num_tokens: ids that the tokenizer has; None
    for all rows. Raises InvalidCheckpoint for features that our decoder would compute wrongly, and
    for impossible values."""
    if config.model_type not in FAMILIES:
        raise InvalidCheckpoint(
            f"model type {config.model_type!r} is not supported; "
            f"supported families: {', '.join(FAMILIES)}"
        )
    if config.hidden_act != "silu":
        raise InvalidCheckpoint(f"activation {config.hidden_act!r} is not supported (silu is)")
    if "sliding_attention" in (getattr(config, "layer_types", None) or ()):
        raise InvalidCheckpoint(
            "sliding-window attention is not supported: its cache can't be rewound past the window"
        )
    if getattr(config, "quantization_config", None):
        raise InvalidCheckpoint(
            "quantised checkpoints are not supported; use the bfloat16 release or a GGUF file"
        )
    num_kv_heads = config.num_key_value_heads or config.num_attention_heads
    if config.num_attention_heads % num_kv_heads:
        raise InvalidCheckpoint(
            f"{config.num_attention_heads} query heads can't share {num_kv_heads} key-value heads "
            "evenly"
        )
    if not 0 <= config.rms_norm_eps < 1:
        raise InvalidCheckpoint(f"rms_norm_eps: {config.rms_norm_eps} is not within 0 and 1")
    inv_freq, rope_scale = _rotary(config)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if 2 * len(inv_freq) != head_dim:
        raise InvalidCheckpoint("partial rotary embeddings are not supported")
    qkv_bias, out_bias, mlp_bias = _biases(config)
    return DecoderConfig(
        family=config.model_type,
        vocab_size=config.vocab_size,
        num_tokens=min(num_tokens or config.vocab_size, config.vocab_size),
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_layers=config.num_hidden_layers,
        num_heads=config.num_attention_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        norm_eps=config.rms_norm_eps,
        max_length=config.max_position_embeddings,
        tied=bool(config.tie_word_embeddings),
        qkv_bias=qkv_bias,
        out_bias=out_bias,
        mlp_bias=mlp_bias,
        inv_freq=tuple(inv_freq.tolist()),
        rope_scale=rope_scale,
    )


def _biases(config: Any) -> tuple[bool, bool, bool]:
    """True for the linear layers with a bias: (query, key and value; attention output; MLP)."""
    if config.model_type == "qwen2":
        return True, False, False
    attention = bool(getattr(config, "attention_bias", False))
    mlp = config.model_type == "llama" and bool(getattr(config, "mlp_bias", False))
    return attention, attention, mlp


def _rotary(config: Any) -> tuple[Tensor, float]:
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    parameters = getattr(config, "rope_parameters", None) or {}
    rope_type = parameters.get("rope_type", "default")
    # with one list of factors for all lengths, longrope is fixed like the others
    fixed = parameters.get("short_factor") == parameters.get("long_factor")
    if rope_type not in ROPE_TYPES and not (rope_type == "longrope" and fixed):
        raise InvalidCheckpoint(
            f"rotary variant {rope_type!r} is not supported; supported: {', '.join(ROPE_TYPES)}"
        )
    try:
        rotary = LlamaRotaryEmbedding(config=config)
        inv_freq, scale = rotary.inv_freq.to(torch.float64), float(rotary.attention_scaling)
    except Exception as error:  # of any kind: transformers computes with unchecked values
        raise InvalidCheckpoint(f"rope_parameters: {type(error).__name__}: {error}") from error
    if not inv_freq.isfinite().all() or not math.isfinite(scale):
        raise InvalidCheckpoint("rope_parameters: they make rotary frequencies that are not finite")
    return inv_freq, scale
