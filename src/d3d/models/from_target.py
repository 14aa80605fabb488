"""Make an untrained drafter of a causal language model: any subset of its layers, with deltas or with full weights."""

from __future__ import annotations

import torch
from torch import Tensor

from d3d.models.config import DecoderConfig
from d3d.models.drafter import DrafterConfig, DrafterModel
from d3d.models.linear import Linear
from d3d.models.transformer import Transformer


def from_target(config: DecoderConfig, tensors: dict[str, Tensor], drafter: DrafterConfig, *, seed: int = 0) -> DrafterModel:
    """A drafter whose clean rows compute what the kept layers of the model compute.

    With deltas, `down` is random and `up` zero (LoRA's start), so slots begin with the base model's weights too. Without, the
    weights are copies and all of them can be trained. Raises InvalidCheckpoint as `Transformer` does.
    """
    if drafter.delta is None:
        tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    model = DrafterModel(drafter, Transformer(config, tensors, layers=drafter.kept_layers))
    generator = torch.Generator().manual_seed(seed)
    embedding = model.transformer.embedding
    if drafter.delta is None:
        for parameter in model.transformer.parameters():
            parameter.requires_grad_(True)
    else:
        add_deltas(model, drafter.delta.rank, generator)
    if drafter.mask_token_id is None:
        # near the middle of the embeddings, where an input that says nothing belongs
        noise = torch.randn(config.hidden_size, generator=generator) * embedding.float().std().item()
        model.set_mask_vector((embedding.float().mean(0) + noise.to(embedding.device)).to(torch.float32))
    return model


def delta_layers(model: DrafterModel) -> dict[str, Linear]:
    """The linear layers that carry deltas, by name: all of the decoder's, not the head."""
    return {name: module for name, module in model.transformer.layers.named_modules() if isinstance(module, Linear)}


def add_deltas(model: DrafterModel, rank: int, generator: torch.Generator) -> None:
    for module in delta_layers(model).values():
        out_features, in_features = module.weight.shape
        down = torch.randn(rank, in_features, generator=generator) * in_features**-0.5
        module.add_delta(down.to(module.weight.device), torch.zeros(out_features, rank, device=module.weight.device))
