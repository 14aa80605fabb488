"""Weights for the C library, from tensors or from a GGUF file as it is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from numpy.typing import NDArray
from torch import Tensor

from d3d.model.config import DecoderConfig
from d3d.native import library as c
from d3d.native.build import NativeUnavailable


class StoredMatrix(NamedTuple):
    """A matrix in its file's layout."""

    format: str
    rows: int
    columns: int
    data: NDArray[Any]
    """C-contiguous; its bytes are the rows."""
    permuted_heads: int = 0
    """Heads whose rows llama.cpp's converter has interleaved; 0: none have been."""


class Weights(NamedTuple):
    """Weights of a model, by Hugging Face name."""

    matrix: Callable[[str], StoredMatrix]
    vector: Callable[[str], NDArray[np.float32]]
    has: Callable[[str], bool]


MATRICES = {
    "self_attn.q_proj": c.Q,
    "self_attn.k_proj": c.K,
    "self_attn.v_proj": c.V,
    "self_attn.o_proj": c.OUT,
    "mlp.gate_proj": c.GATE,
    "mlp.up_proj": c.UP,
    "mlp.down_proj": c.DOWN,
}
NORMS = {
    "input_layernorm": c.ATTENTION_NORM,
    "post_attention_layernorm": c.MLP_NORM,
    "self_attn.q_norm": c.Q_NORM,
    "self_attn.k_norm": c.K_NORM,
}
GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
}
_TORCH_FORMATS = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


def tensor_weights(tensors: Mapping[str, Tensor]) -> Weights:
    """Tensors by Hugging Face name: float32, float16 or bfloat16, each stored as it is."""

    def take(name: str) -> Tensor:
        if name not in tensors:
            raise NativeUnavailable(f"tensor {name} is missing; fetch the model again")
        return tensors[name].detach().contiguous()

    def matrix(name: str) -> StoredMatrix:
        tensor = take(name)
        if tensor.dtype not in _TORCH_FORMATS:
            raise NativeUnavailable(f"tensor {name} holds {tensor.dtype}, which has no C kernel")
        rows, columns = tensor.shape
        return StoredMatrix(
            _TORCH_FORMATS[tensor.dtype], rows, columns, tensor.view(torch.uint8).numpy()
        )

    return Weights(matrix, lambda name: take(name).float().numpy(), tensors.__contains__)


def gguf_weights(path: Path, config: DecoderConfig) -> Weights:
    """A GGUF file's weights, quantised as they are. The file stays mapped while this is in use."""
    reader = GGUFReader(path)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    architecture = reader.get_field("general.architecture")
    is_permuted = architecture is not None and architecture.contents() == "llama"
    heads = {"attn_q": config.num_heads, "attn_k": config.num_kv_heads}

    def take(name: str) -> Any:
        theirs = gguf_name(name)
        if theirs not in tensors:
            raise NativeUnavailable(f"{path} lacks the tensor {theirs}; fetch it again")
        return tensors[theirs]

    def matrix(name: str) -> StoredMatrix:
        tensor = take(name)
        kind = tensor.tensor_type.name
        if kind not in c.FORMATS:
            raise NativeUnavailable(
                f"{path}: {tensor.name} is stored as {kind}, which has no C kernel "
                f"(there are {', '.join(c.FORMATS)})"
            )
        columns, rows = (int(size) for size in tensor.shape)
        part = tensor.name.split(".")[-2]
        return StoredMatrix(
            kind, rows, columns, tensor.data, heads.get(part, 0) if is_permuted else 0
        )

    def vector(name: str) -> NDArray[np.float32]:
        tensor = take(name)
        return np.ascontiguousarray(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)

    return Weights(matrix, vector, lambda name: gguf_name(name) in tensors)


def gguf_name(name: str) -> str:
    """GGUF name of a tensor with this Hugging Face name."""
    body, _, kind = name.rpartition(".")
    if body.startswith("model.layers."):
        index, _, part = body.removeprefix("model.layers.").partition(".")
        return f"blk.{index}.{GGUF_NAMES[part]}.{kind}"
    return f"{GGUF_NAMES[body]}.{kind}"
