"""Build an untrained drafter from some layers of a causal language model, with deltas or with full
weights."""

from __future__ import annotations

import copy

import torch
from torch import nn

from d3d.errors import InvalidCheckpoint
from d3d.model.choice import PreviousTokenHead
from d3d.model.drafter import DeltaConfig, DrafterConfig, DrafterModel
from d3d.model.linear import Linear
from d3d.model.transformer import Transformer


def from_target(base: Transformer, config: DrafterConfig, *, seed: int = 0) -> DrafterModel:
    """A drafter whose clean rows compute what the kept layers of `base` compute.

    With deltas it shares the base's weights without a copy; `down` is random and `up` zero, as in
    LoRA, so slots start with the base's weights too. Otherwise all weights are trainable copies.
    `base` itself is not changed."""
    model = DrafterModel(
        config, select_layers(base, config.kept_layers, share=config.delta is not None)
    )
    generator = torch.Generator().manual_seed(seed)
    embedding = base.embedding.detach().float()
    if config.delta is None:
        for parameter in model.transformer.parameters():
            parameter.requires_grad_(True)
    else:
        add_deltas(model, config.delta, generator)
    if config.mask_token_id is None:
        # near the mean of the embeddings: an input without information
        noise = torch.randn(embedding.shape[1], generator=generator).to(embedding.device)
        model.set_mask_vector(embedding.mean(0) + noise * embedding.std())
    if config.previous_token_width is not None:
        head = PreviousTokenHead(base.config.hidden_size, config.previous_token_width, generator)
        model.previous_token_head = head.to(embedding.device)
    return model


def select_layers(base: Transformer, kept_layers: tuple[int, ...], *, share: bool) -> Transformer:
    """A transformer of some of another's layers, with shared or copied weights. Raises
    InvalidCheckpoint if a layer does not exist."""
    if kept_layers[-1] >= len(base.layers):
        raise InvalidCheckpoint(
            f"the drafter keeps layer {kept_layers[-1]}, "
            f"its base has layers 0 to {len(base.layers) - 1}"
        )
    shared = [*base.parameters(), base._inv_freq] if share else []
    chosen = copy.copy(base)
    chosen._modules = dict(base._modules)
    chosen.layers = nn.ModuleList(base.layers[layer] for layer in kept_layers)
    return copy.deepcopy(chosen, {id(tensor): tensor for tensor in shared})


def clean_rows_are_of(model: DrafterModel, base: Transformer) -> bool:
    """True if the drafter computes clean rows exactly as `base` does: it shares all of its weights,
    and its deltas act at slots only."""
    own = dict(model.transformer.named_parameters())
    return model.config.clean_rows_are_base and all(
        own.get(name) is parameter for name, parameter in base.named_parameters()
    )


def linear_layers(model: DrafterModel) -> dict[str, Linear]:
    """The decoder's linear layers by name, except the head."""
    return {
        name: module
        for name, module in model.transformer.layers.named_modules()
        if isinstance(module, Linear)
    }


def add_deltas(model: DrafterModel, config: DeltaConfig, generator: torch.Generator) -> None:
    """Add untrained deltas: `down` random, `up` zero."""
    for layer, number in zip(model.transformer.layers, model.config.kept_layers, strict=True):
        if number not in model.config.delta_layers:
            continue
        for name in config.matrices:
            module = getattr(layer, name)
            out_features, in_features = module.weight.shape
            down = torch.randn(config.rank, in_features, generator=generator) * in_features**-0.5
            module.add_delta(
                down.to(module.weight.device),
                torch.zeros(out_features, config.rank, device=module.weight.device),
            )
