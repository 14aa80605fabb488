"""Short identities of weights and of tokenizers, to see whether a drafter belongs to a target."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

SAMPLED_VALUES = 4096
"""Most values of a tensor that enter its fingerprint."""

Vocabulary = Mapping[str, int]
"""Token text to token id."""


def weights_fingerprint(tensors: Mapping[str, Tensor]) -> str:
    """Hex sha256 over the sorted names, the shapes and an evenly strided sample of the values, as
    float32.

    The same for equal values in another dtype (bfloat16 weights saved as float32), and for a tied
    head saved or left out."""
    digest = hashlib.sha256()
    samples = {name: _sample(tensor) for name, tensor in tensors.items()}
    for name in sorted(samples):
        if name == "lm_head.weight" and samples[name] == samples.get("model.embed_tokens.weight"):
            continue  # tied
        digest.update(f"{name} {list(tensors[name].shape)}\n".encode())
        digest.update(samples[name])
    return digest.hexdigest()


def _sample(tensor: Tensor) -> bytes:
    flat = (tensor.to_dense() if tensor.is_mkldnn else tensor).detach().reshape(-1)
    stride = max(1, -(-flat.numel() // SAMPLED_VALUES))
    values = flat[::stride].to(device="cpu", dtype=torch.float32)
    return values.numpy().astype("<f4").tobytes()


def vocabulary(tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
    """Token text to id, added tokens included."""
    return dict(tokenizer.get_vocab())


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase | Vocabulary) -> str:
    """Hex sha256 over the vocabulary in the order of ids, added tokens included."""
    digest = hashlib.sha256()
    for token_id, text in sorted(_by_id(tokenizer).items()):
        digest.update(f"{token_id} {text!r}\n".encode())
    return digest.hexdigest()


def first_difference(
    a: PreTrainedTokenizerBase | Vocabulary, b: PreTrainedTokenizerBase | Vocabulary
) -> str | None:
    """One sentence about the first token id that two tokenizers read differently, or None where
    they agree.

    They agree, too, where one has further tokens behind the other's last: rows that pad a
    vocabulary harm nobody."""
    texts_a, texts_b = _by_id(a), _by_id(b)
    end = min(max(texts_a, default=-1), max(texts_b, default=-1)) + 1
    for token_id in range(end):
        text_a, text_b = texts_a.get(token_id), texts_b.get(token_id)
        if text_a != text_b:
            sizes = f"{len(texts_a)} and {len(texts_b)} tokens"
            return f"the tokenizers differ ({sizes}): token id {token_id} is {_name(text_a)} in the first and {_name(text_b)} in the second"
    return None


def _by_id(tokenizer: PreTrainedTokenizerBase | Vocabulary) -> dict[int, str]:
    entries = tokenizer if isinstance(tokenizer, Mapping) else vocabulary(tokenizer)
    return {token_id: text for text, token_id in entries.items()}


def _name(text: str | None) -> str:
    return "unused" if text is None else repr(text)
