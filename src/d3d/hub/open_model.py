"""Everything that a named model brings: decoder, tokenizer, end tokens and identity."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

import torch

from d3d.errors import InvalidRequest
from d3d.hub.fingerprint import weights_fingerprint
from d3d.hub.loading import eos_token_ids, load_config, load_tokenizer, read_tensors, resolve_model
from d3d.model.config import DecoderConfig, decoder_config
from d3d.model.int8 import check_quantize
from d3d.model.transformer import Transformer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

DTypeName = Literal["float32", "bfloat16", "auto"]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class TargetModel(Protocol):
    """What a target brings, whatever runs it."""

    @property
    def source(self) -> str: ...

    @property
    def path(self) -> Path:
        """Its directory."""
        ...

    @property
    def tokenizer(self) -> PreTrainedTokenizerFast: ...

    @property
    def eos_token_ids(self) -> frozenset[int]: ...

    @property
    def fingerprint(self) -> str:
        """Of its weights."""
        ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def max_length(self) -> int: ...


@dataclass(frozen=True)
class OpenModel:
    """A causal language model, ready to run."""

    source: str
    path: Path
    config: DecoderConfig
    transformer: Transformer
    tokenizer: PreTrainedTokenizerFast
    eos_token_ids: frozenset[int]
    fingerprint: str
    quantize: str | None = None
    """What its linear weights are to be rounded to once they are packed (`pack_weights`); None:
    nothing."""

    @property
    def dtype(self) -> torch.dtype:
        return self.transformer.dtype

    @property
    def device(self) -> torch.device:
        return self.transformer.device

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @property
    def max_length(self) -> int:
        return self.config.max_length


def pick_device(name: str) -> torch.device:
    """`auto` is the first CUDA device, else the CPU. Raises InvalidRequest for a device that is not
    there."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name.split(":")[0] not in ("cpu", "cuda"):
        raise InvalidRequest(f"device: {name!r} is not supported; use auto, cpu, cuda or cuda:N")
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise InvalidRequest(
            "device: no CUDA device is available here; use cpu or auto (d3d doctor shows what is there)"
        )
    try:
        device = torch.device(name)
        if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
            raise InvalidRequest(
                f"device: {name} is not there, this machine has {torch.cuda.device_count()} CUDA devices"
            )
        return device
    except RuntimeError as error:
        raise InvalidRequest(
            f"device: {name!r} is not a device; use auto, cpu, cuda or cuda:N"
        ) from error


def pick_dtype(name: str, device: torch.device) -> torch.dtype:
    """`auto` is bfloat16 where the device computes in it, else float32."""
    if name == "auto":
        return torch.bfloat16 if _has_bfloat16(device) else torch.float32
    if name not in DTYPES:
        raise InvalidRequest(f"dtype: {name!r} is not supported; use auto, float32 or bfloat16")
    return DTYPES[name]


def _has_bfloat16(device: torch.device) -> bool:
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def open_model(
    source: str, *, device: str = "auto", dtype: str = "auto", quantize: str | None = None
) -> OpenModel:
    """Load a model by preset name, directory, GGUF file or hub id. Its weights are as stored
    whatever `quantize` says; who packs them rounds them. Raises InvalidCheckpoint or
    InvalidRequest."""
    where = pick_device(device)
    kind = pick_dtype(dtype, where)
    check_quantize(quantize, where)
    path = resolve_model(source)
    hf_config = load_config(path)
    config = decoder_config(hf_config)
    stored = read_tensors(path)
    fingerprint = weights_fingerprint(stored)
    transformer = Transformer(config, stored, device=where, dtype=kind).eval()
    tokenizer = load_tokenizer(path)
    ends = frozenset(
        token_id
        for token_id in eos_token_ids(path, hf_config, tokenizer)
        if 0 <= token_id < config.vocab_size
    )
    return OpenModel(source, path, config, transformer, tokenizer, ends, fingerprint, quantize)
