"""Turn a GGUF file, once, into a Hugging Face directory in the cache."""

from __future__ import annotations

import io
import os
import shutil
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import torch
from gguf import GGUFReader
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

from d3d.errors import InvalidCheckpoint
from d3d.hub.cache import file_sha256, making
from d3d.hub.converted import converted_directory, is_converted, write_manifest
from d3d.hub.progress import steps_bar
from d3d.hub.quiet import first_line, quiet_transformers

DIGIT_SPLITTERS = frozenset({"smollm", "starcoder", "refact", "command-r", "codeshell"})
"""Pre-tokenizers that split digits off one by one, then apply GPT-2's rule (llama.cpp,
`llama-vocab.cpp`)."""

PLAIN_SPLITTERS = frozenset({"", "default", "gpt-2", "gpt2", "phi-2", "olmo", "jais", "mpt"})
"""Pre-tokenizers that are GPT-2's rule."""


def convert(path: Path) -> Path:
    """Hugging Face directory with the weights, config and tokenizer of a GGUF file; made once, then
    found in the cache.

    Quantised weights are dequantised exactly, which takes float32. A file whose every value is a
    bfloat16 (or else float16) number is stored as that, so no value ever changes. Raises
    InvalidCheckpoint for a damaged or unsupported file."""
    sha256 = file_sha256(path)
    directory = converted_directory(path.stem, sha256)
    if is_converted(directory, sha256):
        return directory
    with making(directory) as work:
        if is_converted(directory, sha256):  # another process was faster
            return directory
        made = work / "model"
        with steps_bar(f"converting {path.name}, once", total=4) as step, quiet_transformers():
            step("reading weights")
            model = _read_model(path)
            step("choosing precision")
            model = model.to(narrowest_exact_dtype(model))
            step("writing weights")
            model.save_pretrained(made)
            step("writing tokenizer")
            _read_tokenizer(path).save_pretrained(made)
        write_manifest(made, path, sha256)
        shutil.rmtree(directory, ignore_errors=True)  # of another format, or damaged
        os.replace(made, directory)
    return directory


def narrowest_exact_dtype(model: torch.nn.Module) -> torch.dtype:
    """The first of bfloat16 and float16 that holds every parameter of a float32 model exactly, else
    float32."""
    for dtype in (torch.bfloat16, torch.float16):
        if all(
            torch.equal(parameter.to(dtype).float(), parameter) for parameter in model.parameters()
        ):
            return dtype
    return torch.float32


def _read_model(path: Path) -> Any:
    try:
        with redirect_stderr(
            io.StringIO()
        ):  # its bar has no switch; ours is bound to the real stream
            return AutoModelForCausalLM.from_pretrained(
                path.parent,
                gguf_file=path.name,
                quantization_config=GgufConfig(dequantize=True),
                dtype=torch.float32,
                local_files_only=True,
            )
    except Exception as error:  # transformers raises many kinds for files that it can't read
        raise InvalidCheckpoint(
            f"{path} can't be read as a GGUF model: {first_line(error)}; fetch it again, or use another one"
        ) from error


def _read_tokenizer(path: Path) -> Any:
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            path.parent, gguf_file=path.name, local_files_only=True
        )
    except Exception as error:  # as above
        raise InvalidCheckpoint(
            f"the tokenizer inside {path} can't be read: {first_line(error)}"
        ) from error
    restore_splitting(tokenizer, _pre_tokenizer_name(path), path)
    return tokenizer


def restore_splitting(tokenizer: Any, name: str, path: Path) -> None:
    """Make a byte-level tokenizer split text as `tokenizer.ggml.pre` says, where transformers does
    not.

    transformers knows the rules of Llama 3 and Qwen and falls back to GPT-2's, without a word, for
    those it does not know."""
    splitter = tokenizer.backend_tokenizer.pre_tokenizer
    if not isinstance(splitter, pre_tokenizers.ByteLevel) or name in PLAIN_SPLITTERS:
        return
    if name not in DIGIT_SPLITTERS:
        raise InvalidCheckpoint(
            f"{path} splits text by the rule {name!r}, which is not supported for GGUF files; use the model's Hugging Face directory"
        )
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [digits, pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )


def _pre_tokenizer_name(path: Path) -> str:
    field = GGUFReader(path).get_field("tokenizer.ggml.pre")
    return "" if field is None else str(field.contents())
