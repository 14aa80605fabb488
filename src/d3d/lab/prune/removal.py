"""A drafter with one layer less, sharing every weight with the one that it was made of."""

from __future__ import annotations

import copy
from typing import TypeVar

from torch import nn

from d3d.model.drafter import DrafterConfig, DrafterModel
from d3d.model.linear import Linear
from d3d.model.transformer import Transformer

Module = TypeVar("Module", DrafterModel, Transformer)


def depth_layers(config: DrafterConfig) -> tuple[int, ...]:
    """The layers that a draft goes through, by their number in the base: what pruning takes
    from."""
    return config.slot_layers or config.kept_layers


def removable(config: DrafterConfig) -> tuple[int, ...]:
    """Those of them that can go: one must stay, and so must the last one with deltas."""
    layers, with_deltas = depth_layers(config), config.delta_layers
    if len(layers) == 1:
        return ()
    return tuple(layer for layer in layers if with_deltas != (layer,))


def without_layer(model: DrafterModel, layer: int) -> DrafterModel:
    """`model` without one of its `removable` layers; `model` itself stays as it is.

    Where clean rows are the base model's, slots pass the layer by and clean rows do not. Else it is
    gone for both."""
    view = _shallow(model)
    transformer = _shallow(model.transformer)
    index = model.config.kept_layers.index(layer)
    view.config = _config_without(model.config, layer)
    if model.config.clean_rows_are_base:
        thinned = _without_deltas(model.transformer.layers[index])
        transformer.layers = nn.ModuleList(
            thinned if i == index else old for i, old in enumerate(model.transformer.layers)
        )
    else:
        transformer.layers = nn.ModuleList(
            old for i, old in enumerate(model.transformer.layers) if i != index
        )
    view.transformer = transformer
    return view


def _config_without(config: DrafterConfig, layer: int) -> DrafterConfig:
    def rest(layers: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(number for number in layers if number != layer)

    changes = (
        {"slot_layers": rest(depth_layers(config))}
        if config.clean_rows_are_base
        else {"kept_layers": rest(config.kept_layers)}
    )
    fields = config.model_dump() | changes
    if config.delta is not None:
        fields["delta"] = config.delta.model_dump() | {"layers": rest(config.delta_layers)}
    return DrafterConfig.model_validate(fields)


def _without_deltas(layer: nn.Module) -> nn.Module:
    bare = copy.deepcopy(layer, {id(parameter): parameter for parameter in layer.parameters()})
    for module in bare.modules():
        if isinstance(module, Linear):
            module.down = module.up = module.merged = None
    return bare


def _shallow(module: Module) -> Module:
    """A copy whose parts are the same objects and can be replaced."""
    chosen = copy.copy(module)
    chosen._modules = dict(module._modules)
    return chosen
