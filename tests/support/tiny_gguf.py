"""Write a tiny Llama as a GGUF file, the way llama.cpp's converter does."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import dequantize, quantize
from numpy.typing import NDArray
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

HIDDEN, LAYERS, HEADS, KV_HEADS, INNER = 64, 2, 4, 2, 96
TEXT = [
    "def add(a, b):\n    return a + b\n",
    "x  = 12\n    y = 345",
    "the cat sat on the mat, can't it?",
] * 4


@dataclass
class TinyGguf:
    """The file, and the float32 values that a reader must find, by Hugging Face name (queries and
    keys, whose rows llama.cpp permutes, are left out)."""

    path: Path
    values: dict[str, NDArray[np.float32]] = field(default_factory=dict)


def write_tiny_gguf(
    path: Path,
    kind: GGMLQuantizationType,
    pre: str = "smollm",
    *,
    fields: Mapping[str, float | str] | None = None,
    tensors: Mapping[str, Sequence[float]] | None = None,
    without: str = "",
) -> TinyGguf:
    """fields: further metadata under `llama.`; tensors: further ones; without: begins the names of
    those left out."""
    writer = GGUFWriter(path, "llama")
    _write_shape(writer)
    for name, value in (fields or {}).items():
        add = {str: writer.add_string, int: writer.add_uint32, float: writer.add_float32}
        add[type(value)](f"llama.{name}", value)  # type: ignore[arg-type]
    for name, values in (tensors or {}).items():
        writer.add_tensor(name, np.array(values, dtype=np.float32))
    num_tokens = _write_tokenizer(writer, pre)
    tiny = TinyGguf(path)
    rng = np.random.default_rng(0)

    def write(theirs: str, ours: str, *shape: int) -> None:
        values = rng.standard_normal(shape).astype(np.float32)
        stored = kind if len(shape) > 1 else GGMLQuantizationType.F32
        if len(shape) == 1:  # bfloat16 numbers that float16 holds too, as in released models
            values = (np.round(values * 16) / 16).clip(-4, 4).astype(np.float32)
        packed = quantize(values, stored)
        if without and theirs.startswith(without):
            return
        writer.add_tensor(f"{theirs}.weight", packed, raw_dtype=stored)
        if ours:
            tiny.values[f"{ours}.weight"] = dequantize(packed, stored)

    kv_size = HIDDEN // HEADS * KV_HEADS
    write("token_embd", "model.embed_tokens", num_tokens, HIDDEN)
    write("output_norm", "model.norm", HIDDEN)
    for layer in range(LAYERS):
        ours, theirs = f"model.layers.{layer}", f"blk.{layer}"
        write(f"{theirs}.attn_norm", f"{ours}.input_layernorm", HIDDEN)
        write(f"{theirs}.ffn_norm", f"{ours}.post_attention_layernorm", HIDDEN)
        write(f"{theirs}.attn_q", "", HIDDEN, HIDDEN)
        write(f"{theirs}.attn_k", "", kv_size, HIDDEN)
        write(f"{theirs}.attn_v", f"{ours}.self_attn.v_proj", kv_size, HIDDEN)
        write(f"{theirs}.attn_output", f"{ours}.self_attn.o_proj", HIDDEN, HIDDEN)
        write(f"{theirs}.ffn_gate", f"{ours}.mlp.gate_proj", INNER, HIDDEN)
        write(f"{theirs}.ffn_up", f"{ours}.mlp.up_proj", INNER, HIDDEN)
        write(f"{theirs}.ffn_down", f"{ours}.mlp.down_proj", HIDDEN, INNER)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tiny


def _write_shape(writer: GGUFWriter) -> None:
    writer.add_name("tiny")
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(HIDDEN // HEADS)


def _write_tokenizer(writer: GGUFWriter, pre: str) -> int:
    tokenizer = Tokenizer(models.BPE())
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [digits, pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=["<|end|>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    vocab = tokenizer.get_vocab()
    tokens = sorted(vocab, key=vocab.__getitem__)
    merges = _merges(tokenizer)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token == "<|end|>" else 1 for token in tokens])
    writer.add_token_merges(merges)
    writer.add_eos_token_id(0)
    writer.add_bos_token_id(0)
    writer.add_vocab_size(len(tokens))
    return len(tokens)


def _merges(tokenizer: Tokenizer) -> list[str]:
    pairs = json.loads(tokenizer.to_str())["model"]["merges"]
    return [" ".join(pair) if isinstance(pair, list) else pair for pair in pairs]
