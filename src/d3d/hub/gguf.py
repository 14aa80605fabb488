"""Convert a GGUF file, once, to a Hugging Face directory in the cache."""

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
from d3d.hub.cache import (
    MANIFEST,
    converted_directory,
    file_sha256,
    is_converted,
    making,
    set_aside,
    write_manifest,
)
from d3d.hub.terminal import quiet_transformers, refusing, steps_bar

DIGIT_SPLITTERS = frozenset({"smollm", "starcoder", "refact", "command-r", "codeshell"})
"""Pre-tokenizers that split off single digits, then apply GPT-2's rule (llama.cpp,
`llama-vocab.cpp`)."""

PLAIN_SPLITTERS = frozenset({"", "default", "gpt-2", "gpt2", "phi-2", "olmo", "jais", "mpt"})
"""Pre-tokenizers that apply GPT-2's rule alone."""


def convert(path: Path) -> Path:
    """Hugging Face directory with weights, config and tokenizer of a GGUF file, from the cache if
    it was converted before.

    Quantised weights are dequantised exactly, in float32. If every value is a bfloat16 (or else
    float16) number, they are stored as that, so no value ever changes. Raises InvalidCheckpoint for
    a damaged or unsupported file."""
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
        if (directory / MANIFEST).is_file():
            shutil.rmtree(directory, ignore_errors=True)  # of another format, or damaged
        elif directory.exists():
            set_aside(directory, "is not a conversion of d3d")
        os.replace(made, directory)
    return directory


def narrowest_exact_dtype(model: torch.nn.Module) -> torch.dtype:
    """bfloat16 or else float16 if it holds every parameter of a float32 model exactly, else
    float32."""
    for dtype in (torch.bfloat16, torch.float16):
        if all(torch.equal(values.to(dtype).float(), values) for values in model.parameters()):
            return dtype
    return torch.float32


def _read_model(path: Path) -> Any:
    problem, advice = f"{path} can't be read as a GGUF model", "fetch it again, or use another one"
    # transformers' bar has no switch, hence the redirection; our bar keeps the real stream
    with refusing(problem, advice), redirect_stderr(io.StringIO()):
        return AutoModelForCausalLM.from_pretrained(
            path.parent,
            gguf_file=path.name,
            quantization_config=GgufConfig(dequantize=True),
            dtype=torch.float32,
            local_files_only=True,
        )


def _read_tokenizer(path: Path) -> Any:
    with refusing(f"the tokenizer inside {path} can't be read"):
        tokenizer = AutoTokenizer.from_pretrained(
            path.parent, gguf_file=path.name, local_files_only=True
        )
    field = GGUFReader(path).get_field("tokenizer.ggml.pre")
    _restore_splitting(tokenizer, "" if field is None else str(field.contents()), path)
    return tokenizer


def _restore_splitting(tokenizer: Any, rule: str, path: Path) -> None:
    """Make a byte-level tokenizer split text by `rule`, the file's `tokenizer.ggml.pre`.

    transformers knows the rules of Llama 3 and Qwen, and silently uses GPT-2's for all others."""
    splitter = tokenizer.backend_tokenizer.pre_tokenizer
    if not isinstance(splitter, pre_tokenizers.ByteLevel) or rule in PLAIN_SPLITTERS:
        return
    if rule not in DIGIT_SPLITTERS:
        raise InvalidCheckpoint(
            f"{path} splits text by the rule {rule!r}, which is not supported for GGUF files; "
            "use the model's Hugging Face directory"
        )
    digits = pre_tokenizers.Digits(individual_digits=True)
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
