"""Two tiny tokenizers and tiny targets, made on the spot."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from d3d.target.native import NativeTarget
from support.tiny import tiny_transformer

CORPUS = ["ha ha ha hello world", "the cat sat on the mat", "你好你好 世界", "naïve café"] * 4


@pytest.fixture(scope="session")
def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE, as of GPT-2, Qwen and SmolLM2; id 0 is its EOS."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=310,
        special_tokens=["<eos>", "<pad>"],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>")


@pytest.fixture(scope="session")
def fallback_tokenizer() -> PreTrainedTokenizerFast:
    """SentencePiece-like with byte fallback, as of Llama 2: the first token's space is dropped,
    unknown characters are bytes."""
    pieces = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        "a",
        "b",
        "▁a",
        "▁b",
        "▁the",
        "▁cat",
        ".",
    ]
    tokenizer = Tokenizer(
        models.BPE(
            {piece: index for index, piece in enumerate(pieces)},
            [],
            unk_token="<unk>",
            byte_fallback=True,
        )
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


@pytest.fixture(scope="session")
def make_target() -> Callable[..., NativeTarget]:
    """Arguments of `tiny_transformer` -> a target engine."""
    return lambda **options: NativeTarget(tiny_transformer(**options))


@pytest.fixture(scope="session")
def target(make_target: Callable[..., NativeTarget]) -> NativeTarget:
    """A Llama-like target of 97 tokens and 512 positions."""
    return make_target()
