"""A drafter's tensors under their Hugging Face names: deltas merged, and an embedding row for the
mask."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from d3d.errors import InvalidCheckpoint
from d3d.model.drafter import DrafterModel
from d3d.model.linear import Linear
from d3d.model.transformer import Layer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
MASK_TOKEN = "<|d3d_mask|>"


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
