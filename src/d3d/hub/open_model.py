"""Open a model: config, tokenizer, end tokens and tensors from its files, and all of them as one
`OpenModel`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple, Protocol

import torch
from pydantic import Field, TypeAdapter, ValidationError
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedTokenizerBase,
)

from d3d.errors import InvalidCheckpoint, InvalidRequest
from d3d.forks import prepare_for_forks
from d3d.hub.fingerprint import weights_fingerprint
from d3d.hub.names import resolve_model
from d3d.hub.terminal import quiet_transformers, refusing
from d3d.inputs import read_object, validated, within
from d3d.model.config import DecoderConfig, DecoderSizes, decoder_config
from d3d.model.int8 import check_quantize
from d3d.model.transformer import Transformer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

CONFIG_FILE = "config.json"
INDEX_FILE = "model.safetensors.index.json"
WEIGHTS_FILE = "model.safetensors"
DRAFTER_TYPE = "d3d_drafter"
"""`model_type` in the config.json of a drafter checkpoint."""

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


TOKEN_IDS: TypeAdapter[int | list[int] | None] = TypeAdapter(
    Annotated[int, Field(strict=True)] | list[Annotated[int, Field(strict=True)]] | None
)


class TargetModel(Protocol):
    """A target, whatever runs it. path: its directory; fingerprint: of its weights; vocab_size:
    rows of its embedding; num_tokens: those that have a token."""

    @property
    def source(self) -> str: ...

    @property
    def path(self) -> Path: ...

    @property
    def tokenizer(self) -> PreTrainedTokenizerFast: ...

    @property
    def eos_token_ids(self) -> frozenset[int]: ...

    @property
    def fingerprint(self) -> str: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def num_tokens(self) -> int: ...

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
    """Storage that `pack_weights` gives the linear weights; None: as they are."""

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
    def num_tokens(self) -> int:
        return self.config.num_tokens

    @property
    def max_length(self) -> int:
        return self.config.max_length


def open_model(
    source: str, *, device: str = "auto", dtype: str = "auto", quantize: str | None = None
) -> OpenModel:
    """Load a model by preset name, directory, GGUF file or hub id.

    `quantize` takes effect when the weights are packed; here they stay as stored. Raises
    InvalidCheckpoint or InvalidRequest."""
    where = pick_device(device)
    kind = pick_dtype(dtype, where)
    check_quantize(quantize, where)
    path, config, tokenizer, ends, stored, fingerprint = read_decoder(source)
    with within(path):
        transformer = Transformer(config, stored, device=where, dtype=kind).eval()
    return OpenModel(source, path, config, transformer, tokenizer, ends, fingerprint, quantize)


class DecoderFiles(NamedTuple):
    """Contents of a decoder's directory."""

    path: Path
    config: DecoderConfig
    tokenizer: PreTrainedTokenizerFast
    eos_token_ids: frozenset[int]
    tensors: dict[str, Tensor]
    fingerprint: str


def read_decoder(source: str) -> DecoderFiles:
    """Read a decoder by preset name, directory, GGUF file or hub id, and prepare this process for
    forks. Raises InvalidCheckpoint."""
    prepare_for_forks()
    path = resolve_model(source).absolute()  # others load it again, perhaps from elsewhere
    hf_config = load_config(path)
    tokenizer = load_tokenizer(path)
    with within(path / CONFIG_FILE):
        config = decoder_config(hf_config, num_tokens(tokenizer))
    stored = read_tensors(path)
    known = range(config.num_tokens)
    ends = frozenset(i for i in eos_token_ids(path, hf_config, tokenizer) if i in known)
    return DecoderFiles(path, config, tokenizer, ends, stored, weights_fingerprint(stored))


def pick_device(name: str) -> torch.device:
    """The device of this name; `auto` is the first CUDA device, else the CPU. Raises
    InvalidRequest if it is not there."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda"):
        raise InvalidRequest(f"device: {name!r} is not supported; use auto, cpu, cuda or cuda:N")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise InvalidRequest(
            "device: no CUDA device is available here; use cpu or auto "
            "(d3d doctor shows what is there)"
        )
    count = torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= count:
        raise InvalidRequest(f"device: {name} is not there, this machine has {count} CUDA devices")
    return device


def pick_dtype(name: str, device: torch.device) -> torch.dtype:
    """The dtype of this name; `auto` is bfloat16 if the device computes in it, else float32."""
    if name == "auto":
        return torch.bfloat16 if _has_bfloat16(device) else torch.float32
    if name not in DTYPES:
        raise InvalidRequest(f"dtype: {name!r} is not supported; use auto, float32 or bfloat16")
    return DTYPES[name]


def _has_bfloat16(device: torch.device) -> bool:
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def load_config(path: Path) -> PretrainedConfig:
    """Config of the model in a directory. Raises InvalidCheckpoint if transformers can't read it,
    or if it is a drafter's."""
    file = path / CONFIG_FILE
    content = read_object(file, "fetch the model again", InvalidCheckpoint)
    if content.get("model_type") == DRAFTER_TYPE:
        raise InvalidCheckpoint(
            f"{path} is a d3d drafter, which can't be a target; "
            "give it as the drafter, and its target as the target"
        )
    validated(DecoderSizes, content, file, kind=InvalidCheckpoint)
    with refusing(f"{file} can't be read"), quiet_transformers():
        config: PretrainedConfig = AutoConfig.from_pretrained(path, local_files_only=True)
    return config


def load_tokenizer(path: Path) -> PreTrainedTokenizerBase:
    """Tokenizer of the model in a directory. Raises InvalidCheckpoint if it is missing or
    damaged."""
    problem = f"the tokenizer in {path} can't be read"
    with refusing(problem, "fetch the model again"), quiet_transformers():
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            path, local_files_only=True
        )
    if not isinstance(tokenizer.model_max_length, int | float):
        raise InvalidCheckpoint(
            f"{path / 'tokenizer_config.json'}: model_max_length: {tokenizer.model_max_length!r} "
            "is not a number"
        )
    if len(tokenizer) == 0:
        raise InvalidCheckpoint(
            f"{path} holds no tokenizer; copy the model's tokenizer files (tokenizer.json) there"
        )
    return tokenizer


def num_tokens(tokenizer: PreTrainedTokenizerBase) -> int:
    """One more than the largest id that has a token."""
    return 1 + max(map(int, tokenizer.get_vocab().values()))


def eos_token_ids(
    path: Path, config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase
) -> frozenset[int]:
    """Token ids that end an answer, as in transformers: those of generation_config.json. If it
    names none, those of the config; else the tokenizer's. May be empty. Raises
    InvalidCheckpoint."""
    generation, given = path / "generation_config.json", None
    if generation.exists():
        content = read_object(generation, "fetch it again", InvalidCheckpoint)
        given = content.get("eos_token_id")
    for file, value in (
        (generation, given),
        (path / CONFIG_FILE, getattr(config, "eos_token_id", None)),
        (path, tokenizer.eos_token_id),
    ):
        try:
            ids = TOKEN_IDS.validate_python(value)
        except ValidationError as error:
            raise InvalidCheckpoint(
                f"{file}: eos_token_id: {value!r} is neither a token id nor a list of them"
            ) from error
        if ids is not None and ids != []:
            return frozenset(ids if isinstance(ids, list) else [ids])
    return frozenset()


def read_tensors(path: Path) -> dict[str, Tensor]:
    """All tensors of a directory's safetensors files, by name, in the stored dtype.

    They are views of mapped files: pages are read on use, and must not be written. Raises
    InvalidCheckpoint that names a file which is missing, cut short, or at odds with the index."""
    index = path / INDEX_FILE
    if not index.is_file():
        if not (path / WEIGHTS_FILE).is_file():
            raise InvalidCheckpoint(
                f"{path} holds neither {WEIGHTS_FILE} nor {INDEX_FILE}; "
                "only safetensors weights are supported"
            )
        return _read_file(path / WEIGHTS_FILE)
    weight_map = read_object(index, "fetch it again", InvalidCheckpoint).get("weight_map")
    if not isinstance(weight_map, dict) or not all(
        isinstance(shard, str) for shard in weight_map.values()
    ):
        raise InvalidCheckpoint(f"{index} has no weight_map; fetch the model again")
    tensors: dict[str, Tensor] = {}
    for shard in sorted(set(weight_map.values())):
        listed = {name for name, file in weight_map.items() if file == shard}
        stored = _read_file(path / shard)
        if odd := sorted(listed ^ stored.keys()):
            holder, lacking = (INDEX_FILE, shard) if odd[0] in listed else (shard, INDEX_FILE)
            raise InvalidCheckpoint(
                f"{path}: {holder} names {odd[0]}, which {lacking} lacks; fetch both files again"
            )
        tensors.update(stored)
    return tensors


def _read_file(file: Path) -> dict[str, Tensor]:
    if not file.is_file():
        raise InvalidCheckpoint(f"the weights file {file} is missing; fetch the model again")
    errors = SafetensorError, OSError, ValueError
    with (
        refusing(f"the weights file {file} is damaged", "fetch it again", errors),
        safe_open(file, framework="pt") as archive,
    ):
        return {name: archive.get_tensor(name) for name in archive.keys()}  # noqa: SIM118 - not a mapping


def tensor_shapes(config: PretrainedConfig) -> dict[str, torch.Size]:
    """Name to shape of a model's tensors, under their Hugging Face names; allocates nothing."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    if config.tie_word_embeddings:
        shapes.pop("lm_head.weight", None)
    return shapes


def blank_transformer(
    config: PretrainedConfig,
    device: torch.device | None = None,
    dtype: torch.dtype | None = None,
    num_tokens: int | None = None,
) -> Transformer:
    """A decoder of this config whose weights are all zero, to be filled in. num_tokens: as in
    `decoder_config`."""
    zeros = {
        name: torch.zeros(shape, device=device, dtype=dtype)
        for name, shape in tensor_shapes(config).items()
    }
    return Transformer(decoder_config(config, num_tokens), zeros).eval()
