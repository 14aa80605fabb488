"""Fingerprints of weights and tokenizers, to check that a drafter belongs to a target."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

SAMPLED_VALUES = 4096
"""Maximum number of values of a tensor that enter the fingerprint."""

Vocabulary = Mapping[str, int]
"""Token text to token id."""


def weights_fingerprint(tensors: Mapping[str, Tensor]) -> str:
    """Hex sha256 over the sorted names, the shapes and an evenly strided sample of the values, as
    float32.

    Equal values in another dtype (bfloat16 weights saved as float32) give the same fingerprint, and
    so does a tied head, saved or left out."""
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


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase | Vocabulary) -> str:
    """Hex sha256 over the vocabulary in the order of ids, added tokens included."""
    digest = hashlib.sha256()
    for token_id, text in sorted(_by_id(tokenizer).items()):
        digest.update(f"{token_id} {text!r}\n".encode())
    return digest.hexdigest()


def first_difference(
    a: PreTrainedTokenizerBase | Vocabulary, b: PreTrainedTokenizerBase | Vocabulary
) -> str | None:
    """One sentence on the first token id that two tokenizers read differently, None if they agree.

    Further tokens after the other's last one don't count: rows that pad a vocabulary are
    harmless."""
    texts_a, texts_b = _by_id(a), _by_id(b)
    end = min(max(texts_a, default=-1), max(texts_b, default=-1)) + 1
    for token_id in range(end):
        text_a, text_b = texts_a.get(token_id), texts_b.get(token_id)
        if text_a != text_b:
            return (
                f"the tokenizers differ ({len(texts_a)} and {len(texts_b)} tokens): "
                f"token id {token_id} is {_name(text_a)} in the first "
                f"and {_name(text_b)} in the second"
            )
    return None


def _by_id(tokenizer: PreTrainedTokenizerBase | Vocabulary) -> dict[int, str]:
    entries = tokenizer if isinstance(tokenizer, Mapping) else tokenizer.get_vocab()
    return {token_id: text for text, token_id in entries.items()}


def _name(text: str | None) -> str:
    return "unused" if text is None else repr(text)
