"""Write a tiny Llama as a GGUF file, the way llama.cpp's converter does."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

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


def write_tiny_gguf(path: Path, kind: GGMLQuantizationType, pre: str = "smollm") -> TinyGguf:
    writer = GGUFWriter(path, "llama")
    _write_shape(writer)
    num_tokens = _write_tokenizer(writer, pre)
    tiny = TinyGguf(path)
    rng = np.random.default_rng(0)
    kv_size = HIDDEN // HEADS * KV_HEADS
    _write(
        writer,
        tiny,
        rng,
        "token_embd.weight",
        "model.embed_tokens.weight",
        (num_tokens, HIDDEN),
        kind,
    )
    _write(
        writer,
        tiny,
        rng,
        "output_norm.weight",
        "model.norm.weight",
        (HIDDEN,),
        GGMLQuantizationType.F32,
    )
    for layer in range(LAYERS):
        ours, theirs = f"model.layers.{layer}", f"blk.{layer}"
        for norm, name in (
            ("attn_norm", "input_layernorm"),
            ("ffn_norm", "post_attention_layernorm"),
        ):
            _write(
                writer,
                tiny,
                rng,
                f"{theirs}.{norm}.weight",
                f"{ours}.{name}.weight",
                (HIDDEN,),
                GGMLQuantizationType.F32,
            )
        matrices = {
            ("attn_q", ""): (HIDDEN, HIDDEN),
            ("attn_k", ""): (kv_size, HIDDEN),
            ("attn_v", "self_attn.v_proj"): (kv_size, HIDDEN),
            ("attn_output", "self_attn.o_proj"): (HIDDEN, HIDDEN),
            ("ffn_gate", "mlp.gate_proj"): (INNER, HIDDEN),
            ("ffn_up", "mlp.up_proj"): (INNER, HIDDEN),
            ("ffn_down", "mlp.down_proj"): (HIDDEN, INNER),
        }
        for (their_name, our_name), shape in matrices.items():
            _write(
                writer,
                tiny,
                rng,
                f"{theirs}.{their_name}.weight",
                our_name and f"{ours}.{our_name}.weight",
                shape,
                kind,
            )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tiny


def _write(
    writer: GGUFWriter,
    tiny: TinyGguf,
    rng: Any,
    theirs: str,
    ours: str,
    shape: tuple[int, ...],
    kind: GGMLQuantizationType,
) -> None:
    values = rng.standard_normal(shape).astype(np.float32)
    if len(shape) == 1:  # bfloat16 numbers that float16 holds too, as the norms of released models
        values = (np.round(values * 16) / 16).clip(-4, 4).astype(np.float32)
    packed = quantize(values, kind)
    writer.add_tensor(theirs, packed, raw_dtype=kind)
    if ours:
        tiny.values[ours] = dequantize(packed, kind)


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
