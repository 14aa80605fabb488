"""Convert a GGUF file, once, to a Hugging Face directory in the cache."""

from __future__ import annotations

import io
import os
import shutil
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any, NoReturn

import torch
from gguf import MODEL_ARCH_NAMES, GGUFReader, dequantize, get_tensor_name_map
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
from d3d.inputs import validated
from d3d.model.config import FAMILIES, DecoderSizes

DIGIT_SPLITTERS = frozenset({"smollm", "starcoder", "refact", "command-r", "codeshell"})
"""Pre-tokenizers that split off single digits, then apply GPT-2's rule (llama.cpp,
`llama-vocab.cpp`)."""

PLAIN_SPLITTERS = frozenset({"", "default", "gpt-2", "gpt2", "phi-2", "olmo", "jais", "mpt"})
"""Pre-tokenizers that apply GPT-2's rule alone."""

SCALING_KEYS: dict[str, dict[str, str | None]] = {
    "none": {"factor": None, "finetuned": None, "original_context_length": None},
    "linear": {"factor": "factor", "finetuned": None, "original_context_length": None},
    "yarn": {
        "factor": "factor",
        "finetuned": None,
        "original_context_length": "original_max_position_embeddings",
        "yarn_beta_fast": "beta_fast",
        "yarn_beta_slow": "beta_slow",
    },
}
"""Keys below `rope.scaling` by type, and their names in `rope_parameters`; None: without effect."""

NEUTRAL = (1, -1)
"""Values with which any other key has no effect (llama.cpp: -1 is the default, 1 a factor)."""

HEAD_SIZES = ("rope.dimension_count", "embedding_length", "attention.head_count")

ROPE_FREQS = "rope_freqs.weight"
"""Divisors of the frequencies, as for Llama 3.1."""


SIZES = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
}
"""GGUF keys of sizes, without the family's name, and their names in a config.json."""


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
    """The model, with all tensors of the file and its rotary frequencies, of which transformers
    reads the unscaled ones only."""
    problem, advice = f"{path} can't be read as a GGUF model", "fetch it again, or use another one"
    with refusing(problem, advice):
        reader = GGUFReader(path)
        family = _value(reader, "general.architecture")
        sizes = {ours: _value(reader, f"{family}.{theirs}") for theirs, ours in SIZES.items()}
    validated(DecoderSizes, sizes, path, kind=InvalidCheckpoint)  # before memory is allocated
    scaling = rotary_scaling(reader, path)
    # transformers' bar has no switch, hence the redirection; our bar keeps the real stream
    with refusing(problem, advice), redirect_stderr(io.StringIO()):
        model, about = AutoModelForCausalLM.from_pretrained(
            path.parent,
            gguf_file=path.name,
            quantization_config=GgufConfig(dequantize=True),
            dtype=torch.float32,
            local_files_only=True,
            output_loading_info=True,
        )
    if missing := sorted(about["missing_keys"]):
        raise InvalidCheckpoint(f"{path} lacks tensors, for example {missing[0]}; {advice}")
    if model.config.model_type in FAMILIES:
        _refuse_left_over(reader, model, path)
    if scaling:
        rotary = getattr(model.config, "rope_parameters", None)
        if not isinstance(rotary, dict) or "rope_type" not in rotary:
            _refuse_rotary(path, f"{scaling['rope_type']!r} in a {model.config.model_type} model")
        model.config.rope_parameters = {**rotary, **scaling}
    return model


def _refuse_left_over(reader: GGUFReader, model: Any, path: Path) -> None:
    """Refuse tensors that transformers leaves out: the model would compute something else."""
    architecture = _value(reader, "general.architecture")
    kind = next(kind for kind, name in MODEL_ARCH_NAMES.items() if name == architecture)
    names = get_tensor_name_map(kind, model.config.num_hidden_layers)
    known = {names.get_name(name, (".weight", ".bias")) for name in model.state_dict()}
    left = [tensor.name for tensor in reader.tensors if tensor.name not in known | {ROPE_FREQS}]
    if left:
        raise InvalidCheckpoint(
            f"{len(left)} tensors of {path} have no place in a {model.config.model_type} decoder, "
            f"for example {left[0]}; use the model's Hugging Face directory"
        )


def rotary_scaling(reader: GGUFReader, path: Path) -> dict[str, Any]:
    """Scaling of the rotary frequencies as `rope_parameters` of a transformers config; empty if
    they are not scaled. Raises InvalidCheckpoint for a scaling that is not known."""
    architecture = _value(reader, "general.architecture")
    rotated, hidden, heads = (_value(reader, f"{architecture}.{name}") for name in HEAD_SIZES)
    if architecture in FAMILIES and isinstance(hidden, int) and isinstance(heads, int):
        head_dim = _value(reader, f"{architecture}.attention.key_length", hidden // heads)
        if rotated not in (None, head_dim):
            _refuse_rotary(path, f"of {rotated} of a head's {head_dim} numbers")
    prefix = f"{architecture}.rope.scaling."
    given = {
        name.removeprefix(prefix): field.contents()
        for name, field in reader.fields.items()
        if name.startswith(prefix)
    }
    given.setdefault("factor", _value(reader, f"{architecture}.rope.scale_linear", 0))
    kind = given.pop("type", "linear")
    factors = {tensor.name: tensor for tensor in reader.tensors if tensor.name.startswith("rope_")}
    if kind not in SCALING_KEYS or factors.keys() - {ROPE_FREQS}:
        _refuse_rotary(path, " with ".join([repr(kind), *factors]))
    keys = SCALING_KEYS[kind]
    if odd := [name for name in given if name not in keys and given[name] not in NEUTRAL]:
        _refuse_rotary(path, f"{kind!r} with {odd[0]} {given[odd[0]]}")
    if kind != "none" and given["factor"] not in (0, 1):
        if factors:
            _refuse_rotary(path, f"{kind!r} with {ROPE_FREQS}")
        context = _value(reader, f"{architecture}.context_length")
        defaults = {"original_max_position_embeddings": context} if kind == "yarn" else {}
        named = {name: given[key] for key, name in keys.items() if name and key in given}
        return {"rope_type": kind, **defaults, **named}
    if not factors:
        return {}
    stored = factors[ROPE_FREQS]
    divisors = dequantize(stored.data, stored.tensor_type).tolist()
    return {  # the variant of transformers that takes a divisor for each frequency
        "rope_type": "longrope",
        "short_factor": divisors,
        "long_factor": divisors,
        "attention_factor": 1.0,
        "original_max_position_embeddings": _value(reader, f"{architecture}.context_length"),
    }


def _refuse_rotary(path: Path, what: str) -> NoReturn:
    raise InvalidCheckpoint(
        f"{path}: rotary scaling {what} is not supported; use the model's Hugging Face directory"
    )


def _value(reader: GGUFReader, name: str, default: Any = None) -> Any:
    field = reader.get_field(name)
    return default if field is None else field.contents()


def _read_tokenizer(path: Path) -> Any:
    with refusing(f"the tokenizer inside {path} can't be read"):
        tokenizer = AutoTokenizer.from_pretrained(
            path.parent, gguf_file=path.name, local_files_only=True
        )
    _restore_splitting(tokenizer, str(_value(GGUFReader(path), "tokenizer.ggml.pre", "")), path)
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
