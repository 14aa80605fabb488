"""Write a drafter as a plain causal language model, its deltas merged, that `transformers` and
engines load by themselves.

A plain model has one set of weights for every row, so the merged weights are those of the slots,
and clean tokens go through them, too."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub import save_torch_state_dict
from torch import Tensor
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from d3d.errors import D3DError, InvalidCheckpoint, InvalidRequest
from d3d.hub.checkpoint import (
    DECODER,
    CheckpointConfig,
    check_mask_token,
    load_drafter,
    read_config,
    read_provenance,
)
from d3d.hub.export_notes import grown, limits, mask_text
from d3d.hub.fingerprint import first_difference, weights_fingerprint
from d3d.hub.loading import (
    eos_token_ids,
    load_config,
    load_tokenizer,
    read_tensors,
    resolve_model,
    resolve_tokenizer,
)
from d3d.hub.merged import EMBEDDING, HEAD, give_mask_a_row, merged_tensors
from d3d.hub.model_card import CARD_FILE, Made, exported_card
from d3d.hub.open_model import OpenModel, open_model
from d3d.hub.tiny import tensor_shapes
from d3d.model.config import decoder_config
from d3d.model.drafter import DrafterConfig
from d3d.model.transformer import Transformer

if TYPE_CHECKING:
    from transformers import PretrainedConfig

EXPORT_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
GENERATION_CONFIG = "generation_config.json"


@dataclass(frozen=True)
class Exported:
    """What was written."""

    path: Path
    dtype: str
    vocab_size: int
    mask_token_id: int
    limits: tuple[str, ...]
    """What the plain model can't do as the drafter in d3d does, and what an engine may mind."""


def export_drafter(
    drafter: Path,
    output: Path,
    *,
    target: str | None = None,
    dtype: str = "auto",
    mask_token_id: int | None = None,
) -> Exported:
    """Write the checkpoint `drafter` to the new directory `output`: config, weights under Hugging
    Face names, tokenizer, model card.

    target: name of the target, or of the base that the deltas belong to; by default the base that
    the checkpoint names. dtype: float32, bfloat16, float16, or auto: that of the base's stored
    weights, else bfloat16. mask_token_id: a reserved token whose embedding a learned mask vector
    replaces; by default `<|d3d_mask|>` is added. Deltas are merged in float32, so this takes about
    eight bytes of memory a parameter. Raises InvalidRequest and InvalidCheckpoint."""
    if dtype not in (*EXPORT_DTYPES, "auto"):
        raise InvalidRequest(
            f"dtype: {dtype!r} is not supported; use auto, {', '.join(EXPORT_DTYPES)}"
        )
    output = output.expanduser().absolute()
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise InvalidRequest(f"{output} exists already; remove it, or name another directory")
    config = read_config(drafter)
    _check_target(drafter, target)
    base, hf_config = _open_base(drafter, config, target)
    if mask_token_id is not None:
        _check_replaceable(mask_token_id, config.drafter, base)
    kind = _stored_dtype(base, config.drafter) if dtype == "auto" else EXPORT_DTYPES[dtype]
    model = load_drafter(drafter, base)
    tensors, tokenizer = merged_tensors(model, kind), load_tokenizer(drafter)
    mask = config.drafter.mask_token_id
    if model.mask_vector is not None:
        mask = give_mask_a_row(tensors, model.mask_vector, tokenizer, mask_token_id)
    assert mask is not None, "a drafter has a mask vector or a mask token"
    found = limits(config.drafter)
    if (vocab_size := len(tensors[EMBEDDING])) > base.config.vocab_size:
        found.append(grown(vocab_size, base.config.vocab_size))
    exported = Exported(output, str(kind).removeprefix("torch."), vocab_size, mask, tuple(found))
    with _whole_directory(output) as work:
        _exported_config(hf_config, config.drafter, tensors, exported).save_pretrained(work)
        _write_weights(work, tensors)
        tokenizer.save_pretrained(work)
        _write_generation_config(work, base, hf_config, mask)
        made = Made(
            config.drafter, config.base.source, config.base.fingerprint, read_provenance(drafter)
        )
        text = mask_text(
            mask, tokenizer.convert_ids_to_tokens(mask), config.drafter, tied=base.config.tied
        )
        (work / CARD_FILE).write_text(
            exported_card(made, exported.dtype, text, found), encoding="utf-8"
        )
    return exported


def _check_target(drafter: Path, target: str | None) -> None:
    if target is None:
        return
    difference = first_difference(
        load_tokenizer(drafter), load_tokenizer(resolve_tokenizer(target))
    )
    if difference is not None:
        raise InvalidCheckpoint(
            f"the drafter {drafter} has another tokenizer than the target {target}: {difference}"
        )


def _open_base(
    drafter: Path, config: CheckpointConfig, target: str | None
) -> tuple[OpenModel, PretrainedConfig]:
    """The model that the drafter is made of, in float32 on the CPU, and its config; blank where the
    checkpoint holds all weights."""
    if config.drafter.delta is not None:
        base = open_model(
            str(_base_directory(drafter, config, target)), device="cpu", dtype="float32"
        )
        return base, load_config(base.path)
    path = drafter / DECODER
    hf_config, tokenizer = load_config(path), load_tokenizer(drafter)
    shape = decoder_config(hf_config)
    transformer = Transformer(
        shape, {name: torch.zeros(size) for name, size in tensor_shapes(hf_config).items()}
    ).eval()
    ends = eos_token_ids(path, hf_config, tokenizer)
    return OpenModel(
        config.base.source, path, shape, transformer, tokenizer, ends, config.base.fingerprint
    ), hf_config


def _base_directory(drafter: Path, config: CheckpointConfig, target: str | None) -> Path:
    """Where the weights lie that the deltas belong to: the target's, or those that the checkpoint
    names."""
    if target is not None:
        path = resolve_model(target)
        if weights_fingerprint(read_tensors(path)) == config.base.fingerprint:
            return path
    source, fingerprint = config.base.source, config.base.fingerprint[:12]
    wanted = f"the drafter {drafter} holds deltas over {source} (fingerprint {fingerprint})"
    try:
        path = resolve_model(source)
        found = weights_fingerprint(read_tensors(path))
    except D3DError as error:
        raise InvalidCheckpoint(
            f"{wanted}, which is not to be had: {error}; name it with --target"
        ) from error
    if found != config.base.fingerprint:
        raise InvalidCheckpoint(
            f"{wanted}, which has other weights now (fingerprint {found[:12]}); name the right ones with --target"
        )
    return path


def _check_replaceable(mask_token_id: int, config: DrafterConfig, base: OpenModel) -> None:
    """Raises InvalidRequest or InvalidCheckpoint where this token's embedding must stay what it
    is."""
    if config.mask_token_id is not None:
        raise InvalidRequest(
            f"mask_token_id: this drafter's masked places are token {config.mask_token_id} already; leave the option out"
        )
    check_mask_token(config.model_copy(update={"mask_token_id": mask_token_id}), base)
    text = {token_id: text for text, token_id in base.tokenizer.get_vocab().items()}.get(
        mask_token_id
    )
    if text is not None and mask_token_id not in base.tokenizer.added_tokens_decoder:
        raise InvalidRequest(
            f"mask_token_id: {mask_token_id} is {text!r}, an ordinary token of texts; name a reserved one, or none"
        )


def _stored_dtype(base: OpenModel, config: DrafterConfig) -> torch.dtype:
    stored = (
        load_config(base.path).dtype
        if config.delta is None
        else read_tensors(base.path)[EMBEDDING].dtype
    )
    return stored if stored in EXPORT_DTYPES.values() else torch.bfloat16


@contextmanager
def _whole_directory(path: Path) -> Iterator[Path]:
    """A directory to write to, which takes its place when all of it is written; nothing is left of
    one that was not."""
    work = path.with_name(f".{path.name}.partial")
    shutil.rmtree(work, ignore_errors=True)
    try:
        work.mkdir(parents=True)
        yield work
        if path.exists():
            path.rmdir()
        work.rename(path)
    except BaseException:  # Ctrl-C, too
        shutil.rmtree(work, ignore_errors=True)
        raise


def _write_weights(directory: Path, tensors: dict[str, Tensor]) -> None:
    save_torch_state_dict(dict(tensors), directory, metadata={"format": "pt"})
    for file in directory.glob("*.safetensors"):
        file.chmod(
            (directory / "config.json").stat().st_mode
        )  # safetensors' own is for the owner alone


def _exported_config(
    hf_config: PretrainedConfig,
    config: DrafterConfig,
    tensors: dict[str, Tensor],
    exported: Exported,
) -> PretrainedConfig:
    written = copy.deepcopy(hf_config)
    written.num_hidden_layers = len(config.kept_layers)
    if kinds := getattr(hf_config, "layer_types", None):
        written.layer_types = [kinds[layer] for layer in config.kept_layers]
    written.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[hf_config.model_type]]
    written.vocab_size, written.dtype = exported.vocab_size, EXPORT_DTYPES[exported.dtype]
    written.tie_word_embeddings = HEAD not in tensors
    written.mask_token_id = written.pard_token = exported.mask_token_id
    if theta := (getattr(hf_config, "rope_parameters", None) or {}).get("rope_theta"):
        written.rope_theta = theta  # where readers that know no rope_parameters look: they would take another one without a word
    return written


def _write_generation_config(
    directory: Path, base: OpenModel, hf_config: PretrainedConfig, mask_token_id: int
) -> None:
    """The base's, or else what its config says of special tokens; masks are never generated."""
    file = base.path / GENERATION_CONFIG
    content: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    content.pop("_from_model_config", None)
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        content.setdefault(name, getattr(hf_config, name, None))
    if content["eos_token_id"] is None and base.eos_token_ids:
        content["eos_token_id"] = sorted(base.eos_token_ids)
    content["suppress_tokens"] = sorted({*(content.get("suppress_tokens") or ()), mask_token_id})
    (directory / GENERATION_CONFIG).write_text(
        json.dumps(content, indent=2) + "\n", encoding="utf-8"
    )
