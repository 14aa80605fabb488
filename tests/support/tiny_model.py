"""A complete tiny Hugging Face directory, and a drafter checkpoint for it, on which the real
commands run in a second."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from d3d.hub.checkpoint import save_drafter
from d3d.hub.open_model import OpenModel, open_model
from d3d.model.drafter import DeltaConfig, DrafterConfig, DrafterModel
from d3d.model.from_target import from_target
from d3d.model.linear import Linear
from support.tiny import tiny_config, tiny_tensors

CONTEXT = 256
START, END, PAD = "<|im_start|>", "<|im_end|>", "<|pad|>"
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined %}<think>"
    "{% if not enable_thinking %}</think>{% endif %}{% endif %}{% endif %}"
)
TEXTS = [
    "the cat sat on the mat",
    "how much is two and two?",
    "hello [bold] world",
    "naïve café 你好",
] * 4


def tiny_tokenizer(texts: list[str] = TEXTS) -> PreTrainedTokenizerFast:
    """Byte-level BPE with a chat template that knows `system` and `enable_thinking`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=[END, START, PAD],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END, pad_token=PAD, chat_template=TEMPLATE
    )


def write_tiny_target(
    path: Path, *, family: str = "llama", seed: int = 0, texts: list[str] = TEXTS, **config: Any
) -> Path:
    """Config, float32 safetensors, tokenizer and generation config; two rows more than the
    tokenizer has tokens."""
    tokenizer = tiny_tokenizer(texts)
    shape = tiny_config(
        family, vocab_size=len(tokenizer) + 2, max_position_embeddings=CONTEXT, **config
    )
    tokenizer.save_pretrained(path)
    shape.save_pretrained(path)
    save_file(tiny_tensors(shape, seed), path / "model.safetensors")
    (path / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [tokenizer.eos_token_id]})
    )
    return path


def open_tiny(path: Path) -> OpenModel:
    return open_model(str(path), device="cpu", dtype="float32")


def random_drafter(
    base: OpenModel, *, scope: str | None = "slots", seed: int = 7, **config: Any
) -> DrafterModel:
    """Blocks of 6; `scope` of the deltas, None for full weights. Whatever can be trained is random,
    as if it were trained."""
    delta = None if scope is None else DeltaConfig(rank=4, scope=scope)  # type: ignore[arg-type]
    layers = tuple(range(base.config.num_layers))
    model = from_target(
        base.transformer,
        DrafterConfig(**{"block_size": 6, "kept_layers": layers, "delta": delta, **config}),
    )
    generator = torch.Generator().manual_seed(seed)
    for module in model.modules():
        if isinstance(module, Linear) and module.up is not None:
            module.up.data = torch.randn(module.up.shape, generator=generator) * 0.1
    if scope is None:
        for parameter in model.trainable().values():
            parameter.data += torch.randn(parameter.shape, generator=generator) * 0.02
    return model.eval()


def write_tiny_drafter(path: Path, target: Path, **config: Any) -> Path:
    base = open_tiny(target)
    save_drafter(
        path,
        random_drafter(base, **config),
        base,
        provenance={"measured": {"acceptance_length": 1.0}},
    )
    return path
