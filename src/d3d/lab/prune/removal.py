"""Makes a drafter with one layer fewer, which shares all other weights with the original."""

from __future__ import annotations

import copy
from typing import TypeVar

from torch import nn

from d3d.model.drafter import DrafterConfig, DrafterModel
from d3d.model.linear import Linear
from d3d.model.transformer import Transformer

Module = TypeVar("Module", DrafterModel, Transformer)


def depth_layers(config: DrafterConfig) -> tuple[int, ...]:
    """The layers that a draft goes through, by their number in the base: those to prune."""
    return config.slot_layers or config.kept_layers


def removable(config: DrafterConfig) -> tuple[int, ...]:
    """Layers that can be removed: one must stay, and so must the last one with deltas."""
    layers, with_deltas = depth_layers(config), config.delta_layers
    if len(layers) == 1:
        return ()
    return tuple(layer for layer in layers if with_deltas != (layer,))


def without_layer(model: DrafterModel, layer: int) -> DrafterModel:
    """A drafter without one of the `removable` layers; `model` itself is unchanged.

    If clean rows are the base model's, only slots skip the layer; otherwise it is gone for both."""
    view, transformer = _shallow(model), _shallow(model.transformer)
    index = model.config.kept_layers.index(layer)
    layers = list(model.transformer.layers)
    if model.config.clean_rows_are_base:
        layers[index] = _without_deltas(layers[index])
    else:
        del layers[index]
    transformer.layers = nn.ModuleList(layers)
    view.config, view.transformer = _config_without(model.config, layer), transformer
    return view


def _config_without(config: DrafterConfig, layer: int) -> DrafterConfig:
    def rest(layers: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(number for number in layers if number != layer)

    fields = config.model_dump()
    if config.clean_rows_are_base:
        fields["slot_layers"] = rest(depth_layers(config))
    else:
        fields["kept_layers"] = rest(config.kept_layers)
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
    """A copy that shares its submodules, which can be replaced."""
    view = copy.copy(module)
    view._modules = dict(module._modules)
    return view
