"""Export a drafter as a plain causal language model that `transformers` and engines can load.

A plain model has one set of weights for all rows, so the deltas of the slots are merged, and clean
tokens go through them too."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from huggingface_hub import save_torch_state_dict
from torch import Tensor
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from d3d.errors import InvalidCheckpoint, InvalidRequest
from d3d.files import alone_with, new_directory
from d3d.hub.card import (
    CARD_FILE,
    CardFacts,
    export_limits,
    exported_card,
    mask_text,
    vocabulary_limit,
)
from d3d.hub.checkpoint import (
    DECODER,
    CheckpointConfig,
    check_mask_token,
    check_tokenizer,
    read_config,
    read_provenance,
    share_weights,
)
from d3d.hub.fingerprint import weights_fingerprint
from d3d.hub.names import resolve_model, resolve_tokenizer
from d3d.hub.open_drafter import load_drafter, open_base
from d3d.hub.open_model import (
    OpenModel,
    blank_transformer,
    eos_token_ids,
    load_config,
    load_tokenizer,
    open_model,
    read_tensors,
)
from d3d.inputs import read_object
from d3d.json_text import to_json
from d3d.model.drafter import DrafterConfig, DrafterModel
from d3d.model.linear import Linear
from d3d.model.transformer import Layer

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerFast

EXPORT_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
GENERATION_CONFIG = "generation_config.json"
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
MASK_TOKEN = "<|d3d_mask|>"


@dataclass(frozen=True)
class Exported:
    """An exported drafter."""

    path: Path
    dtype: str
    vocab_size: int
    mask_token_id: int
    limits: tuple[str, ...]
    """Losses against the drafter in d3d, and reasons for an engine to refuse the model."""


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
    weights, else bfloat16. mask_token_id: a reserved token whose embedding is replaced by a learned
    mask vector; by default `<|d3d_mask|>` is added. Deltas are merged in float32, so this takes
    about eight bytes of memory a parameter. Raises InvalidRequest and InvalidCheckpoint."""
    if dtype not in (*EXPORT_DTYPES, "auto"):
        known = ", ".join(EXPORT_DTYPES)
        raise InvalidRequest(f"dtype: {dtype!r} is not supported; use auto, {known}")
    output = output.expanduser().absolute()
    with alone_with(output, "d3d export"):
        return _export(drafter, output, target, dtype, mask_token_id)


def _export(
    drafter: Path, output: Path, target: str | None, dtype: str, mask_token_id: int | None
) -> Exported:
    _check_new(output)
    config = read_config(drafter)
    if target is not None:
        check_tokenizer(drafter, load_tokenizer(resolve_tokenizer(target)), target)
    base, hf_config = _open_base(drafter, config, target)
    if mask_token_id is not None:
        _check_replaceable(mask_token_id, config.drafter, base)
    kind = _stored_dtype(base, config.drafter) if dtype == "auto" else EXPORT_DTYPES[dtype]
    model, tokenizer = load_drafter(drafter, base), load_tokenizer(drafter)
    tensors, mask = merged_tensors(model, kind), config.drafter.mask_token_id
    if model.mask_vector is not None:
        mask = add_mask_row(tensors, model.mask_vector, tokenizer, mask_token_id)
    assert mask is not None, "a drafter has a mask vector or a mask token"
    limits = export_limits(config.drafter)
    if (vocab_size := len(tensors[EMBEDDING])) > base.config.vocab_size:
        limits.append(vocabulary_limit(vocab_size, base.config.vocab_size))
    exported = Exported(output, str(kind).removeprefix("torch."), vocab_size, mask, tuple(limits))
    token = tokenizer.convert_ids_to_tokens(mask)
    text = mask_text(mask, token, config.drafter, tied=base.config.tied)
    provenance = read_provenance(drafter)
    facts = CardFacts(config.drafter, config.base.source, config.base.fingerprint, provenance)
    with new_directory(output) as work:
        _exported_config(hf_config, config.drafter, tensors, exported).save_pretrained(work)
        save_torch_state_dict(dict(tensors), work, metadata={"format": "pt"})
        share_weights(work)
        tokenizer.save_pretrained(work)
        _write_generation_config(work, base, hf_config, mask)
        card = exported_card(facts, exported.dtype, text, limits)
        (work / CARD_FILE).write_text(card, encoding="utf-8")
        _check_new(output)  # again: it is about to be replaced
    return exported


def _check_new(output: Path) -> None:
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise InvalidRequest(f"{output} exists already; remove it, or name another directory")


def _open_base(
    drafter: Path, config: CheckpointConfig, target: str | None
) -> tuple[OpenModel, PretrainedConfig]:
    """The model that the drafter is made of, in float32 on the CPU, and its config; with blank
    weights if the checkpoint holds them all."""
    if config.drafter.delta is not None:
        path = None if target is None else resolve_model(target)
        if path and weights_fingerprint(read_tensors(path)) == config.base.fingerprint:
            base = open_model(str(path), device="cpu", dtype="float32")
        else:
            hint = "name the model with these weights by --target"
            base = open_base(drafter, config.base, hint, device="cpu", dtype="float32")
        return base, load_config(base.path)
    path = drafter / DECODER
    hf_config, tokenizer = load_config(path), load_tokenizer(drafter)
    decoder = blank_transformer(hf_config)
    ends = eos_token_ids(path, hf_config, tokenizer)
    source, fingerprint = config.base.source, config.base.fingerprint
    base = OpenModel(source, path, decoder.config, decoder, tokenizer, ends, fingerprint)
    return base, hf_config


def _check_replaceable(mask_token_id: int, config: DrafterConfig, base: OpenModel) -> None:
    """Raises InvalidRequest or InvalidCheckpoint if this token's embedding must not be replaced."""
    if config.mask_token_id is not None:
        raise InvalidRequest(
            "mask_token_id: this drafter's masked positions are token "
            f"{config.mask_token_id} already; leave the option out"
        )
    check_mask_token(config.model_copy(update={"mask_token_id": mask_token_id}), base)
    texts = {token_id: text for text, token_id in base.tokenizer.get_vocab().items()}
    if mask_token_id in texts and mask_token_id not in base.tokenizer.added_tokens_decoder:
        raise InvalidRequest(
            f"mask_token_id: {mask_token_id} is {texts[mask_token_id]!r}, an ordinary token of "
            "texts; name a reserved one, or none"
        )


def _stored_dtype(base: OpenModel, config: DrafterConfig) -> torch.dtype:
    if config.delta is None:
        dtype = load_config(base.path).dtype
    else:
        dtype = read_tensors(base.path)[EMBEDDING].dtype
    return dtype if dtype in EXPORT_DTYPES.values() else torch.bfloat16


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
        # older readers know no rope_parameters, and would silently use another base
        written.rope_theta = theta
    return written


def _write_generation_config(
    directory: Path, base: OpenModel, hf_config: PretrainedConfig, mask_token_id: int
) -> None:
    """Write the base's generation config, or else the special tokens of its config; masks are never
    generated."""
    file = base.path / GENERATION_CONFIG
    content = read_object(file, kind=InvalidCheckpoint) if file.is_file() else {}
    content.pop("_from_model_config", None)
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        content.setdefault(name, getattr(hf_config, name, None))
    if content["eos_token_id"] is None and base.eos_token_ids:
        content["eos_token_id"] = sorted(base.eos_token_ids)
    content["suppress_tokens"] = sorted({*(content.get("suppress_tokens") or ()), mask_token_id})
    text = to_json(content, indent=2) + "\n"
    (directory / GENERATION_CONFIG).write_text(text, encoding="utf-8")


@torch.no_grad()
def merged_tensors(model: DrafterModel, dtype: torch.dtype) -> dict[str, Tensor]:
    """Name to tensor of the drafter's decoder in `dtype`: layers numbered from 0, no head if it is
    tied, no mask vector and no previous-token head.

    Deltas are merged in float32, or in the model's dtype if that is wider. Raises InvalidCheckpoint
    if a value is not finite in `dtype`."""
    decoder = model.transformer
    tensors = {EMBEDDING: decoder.embedding, "model.norm.weight": decoder.norm.weight}
    if not decoder.config.tied:
        tensors[HEAD] = decoder.head.weight
    merged = {name: tensor.detach().to(dtype) for name, tensor in tensors.items()}
    for index, layer in enumerate(decoder.layers):
        assert isinstance(layer, Layer)
        for name, part in _layer_tensors(layer).items():
            # a copy, since views of one matrix can't be stored
            merged[f"model.layers.{index}.{name}"] = part.detach().to(dtype, copy=True)
    for name, tensor in merged.items():
        if not torch.isfinite(tensor).all():
            raise InvalidCheckpoint(
                f"{name} holds values that are not finite in {str(dtype).removeprefix('torch.')}; "
                "try float32"
            )
    return merged


def _layer_tensors(layer: Layer) -> dict[str, Tensor]:
    c = layer.config
    queries, keys, wide = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim, c.intermediate_size
    norms = {
        "input_layernorm": layer.attention_norm,
        "self_attn.q_norm": layer.q_norm,
        "self_attn.k_norm": layer.k_norm,
        "post_attention_layernorm": layer.mlp_norm,
    }
    tensors: dict[str, Tensor] = {
        f"{name}.weight": norm.weight for name, norm in norms.items() if norm is not None
    }
    attention = {"self_attn.q_proj": queries, "self_attn.k_proj": keys, "self_attn.v_proj": keys}
    for linear, rows in (
        (layer.qkv, attention),
        (layer.out, {"self_attn.o_proj": c.hidden_size}),
        (layer.gate_up, {"mlp.gate_proj": wide, "mlp.up_proj": wide}),
        (layer.down, {"mlp.down_proj": c.hidden_size}),
    ):
        parts = {"weight": _merged_weight(linear), "bias": linear.bias}
        for kind, whole in parts.items():
            if whole is not None:
                split = whole.split(list(rows.values()))
                tensors |= {f"{name}.{kind}": t for name, t in zip(rows, split, strict=True)}
    return tensors


def _merged_weight(linear: Linear) -> Tensor:
    """Weight that computes on every row what weight and delta compute together, [out_features,
    in_features]."""
    if linear.up is None or linear.down is None:
        return linear.weight
    return linear.weight.float() + linear.up.float() @ linear.down.float()


@torch.no_grad()
def add_mask_row(
    tensors: dict[str, Tensor],
    vector: Tensor,
    tokenizer: PreTrainedTokenizerFast,
    token_id: int | None,
) -> int:
    """Make the learned mask vector a row of the embedding, in place; returns its token id.

    token_id: token whose row it replaces; None: a new special token, in a spare row after the
    tokenizer's tokens or else in an added one. Its row of the head becomes the mean of all rows, so
    its logit is the mean of all logits and never above the best: no mask is drafted. A tied head is
    untied for that."""
    if token_id is None:
        from transformers import AddedToken

        token = AddedToken(MASK_TOKEN, special=True, normalized=False)
        tokenizer.add_special_tokens({"mask_token": token})
        token_id = int(tokenizer.convert_tokens_to_ids(MASK_TOKEN))
    embedding, head = tensors[EMBEDDING], tensors.get(HEAD, tensors[EMBEDDING])
    mean = head.float().mean(0).to(head.dtype)
    added = max(0, token_id + 1 - len(embedding))
    embedding = torch.cat((embedding, embedding.new_zeros(added, embedding.shape[1])))
    head = torch.cat((head, mean.expand(added, -1)))
    embedding[token_id] = vector.to(embedding.dtype)
    head[token_id] = mean
    tensors[EMBEDDING], tensors[HEAD] = embedding, head
    return token_id
