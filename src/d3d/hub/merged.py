"""A drafter's tensors under their Hugging Face names, deltas merged, and a row of the embedding for
its masked places."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from d3d.errors import InvalidCheckpoint
from d3d.model.drafter import DrafterModel
from d3d.model.linear import Linear
from d3d.model.transformer import Layer, Norm

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
MASK_TOKEN = "<|d3d_mask|>"


@torch.no_grad()
def merged_tensors(model: DrafterModel, dtype: torch.dtype) -> dict[str, Tensor]:
    """Name to tensor of the drafter's decoder, layers numbered from 0, no head where it is tied;
    without mask vector and previous-token head. Deltas are merged in float32, or what the model is
    in where that is wider.

    Raises InvalidCheckpoint where a value is not finite in `dtype`.
    """
    decoder = model.transformer
    tensors: dict[str, Tensor] = {
        EMBEDDING: decoder.embedding,
        "model.norm.weight": decoder.norm.weight,
    }
    if not decoder.config.tied:
        tensors[HEAD] = decoder.head.weight
    merged = {name: tensor.detach().to(dtype) for name, tensor in tensors.items()}
    for index, layer in enumerate(decoder.layers):
        assert isinstance(layer, Layer)
        parts = _layer_tensors(
            layer
        )  # some of them are parts of one matrix, which can't be stored as such
        merged |= {
            f"model.layers.{index}.{name}": part.detach().to(dtype, copy=True)
            for name, part in parts.items()
        }
    for name, tensor in merged.items():
        if not torch.isfinite(tensor).all():
            raise InvalidCheckpoint(
                f"{name} holds values that are not finite in {str(dtype).removeprefix('torch.')}; try float32"
            )
    return merged


def _layer_tensors(layer: Layer) -> dict[str, Tensor]:
    c = layer.config
    queries, keys, wide = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim, c.intermediate_size
    norms: dict[str, Norm | None] = {
        "input_layernorm": layer.attention_norm,
        "self_attn.q_norm": layer.q_norm,
        "self_attn.k_norm": layer.k_norm,
        "post_attention_layernorm": layer.mlp_norm,
    }
    tensors = {
        f"{name}.weight": norm.weight.detach() for name, norm in norms.items() if norm is not None
    }
    parts: list[tuple[Linear, dict[str, int]]] = [
        (
            layer.qkv,
            {"self_attn.q_proj": queries, "self_attn.k_proj": keys, "self_attn.v_proj": keys},
        ),
        (layer.out, {"self_attn.o_proj": c.hidden_size}),
        (layer.gate_up, {"mlp.gate_proj": wide, "mlp.up_proj": wide}),
        (layer.down, {"mlp.down_proj": c.hidden_size}),
    ]
    for linear, rows in parts:
        weights = merged_weight(linear).split(list(rows.values()))
        tensors |= {f"{name}.weight": weight for name, weight in zip(rows, weights, strict=True)}
        if linear.bias is not None:
            tensors |= {
                f"{name}.bias": bias
                for name, bias in zip(rows, linear.bias.split(list(rows.values())), strict=True)
            }
    return tensors


def merged_weight(linear: Linear) -> Tensor:
    """The weight that computes on every row what weight and delta compute together, [out_features,
    in_features]."""
    if linear.up is None or linear.down is None:
        return linear.weight.detach()
    return (linear.weight.float() + linear.up.float() @ linear.down.float()).detach()


@torch.no_grad()
def give_mask_a_row(
    tensors: dict[str, Tensor],
    vector: Tensor,
    tokenizer: PreTrainedTokenizerFast,
    token_id: int | None,
) -> int:
    """Make the learned vector a row of the embedding, in place, and return its token id.

    token_id: whose row it replaces; None: a new special token, in a spare row behind the
    tokenizer's tokens or else in an added one. Its row of the head becomes the mean of all rows, so
    its logit is the mean of all logits and never above the best: a model drafts no masks. A tied
    head is untied for that."""
    if token_id is None:
        from transformers import AddedToken

        tokenizer.add_special_tokens(
            {"mask_token": AddedToken(MASK_TOKEN, special=True, normalized=False)}
        )
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
