"""Memory that a model takes, from its config alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from d3d.errors import InvalidCheckpoint
from d3d.hub.download import find_conversion
from d3d.hub.names import fetch_config, is_hub_id, resolve_model
from d3d.hub.open_model import load_config
from d3d.hub.presets import PRESETS, is_preset_file, read_preset
from d3d.hub.terminal import quiet_transformers, refusing
from d3d.inputs import input_path


@dataclass(frozen=True)
class Footprint:
    """Counts of numbers, to be multiplied by the bytes of a dtype."""

    num_parameters: int
    num_linear: int
    """Parameters of linear layers, which `quantize` rounds. The head counts even if it is tied to
    the embedding."""
    num_other: int
    """Parameters that `quantize` leaves alone: embedding, norms, biases."""
    kv_per_token: int
    """Cached keys and values of one token of one sequence, all layers."""
    max_length: int
    """Longest sequence in tokens."""

    def num_bytes(self, context: int, bytes_per_number: int, quantize: str | None = None) -> int:
        """Bytes of the weights and of the cache of one sequence of `context` tokens."""
        cache = self.kv_per_token * context * bytes_per_number
        return self._weight_bytes(bytes_per_number, quantize) + cache

    def longest_context(
        self, num_bytes: int, bytes_per_number: int, quantize: str | None = None
    ) -> int:
        """Tokens of the longest sequence that fits beside the weights; 0 if these don't fit."""
        left = num_bytes - self._weight_bytes(bytes_per_number, quantize)
        return max(0, min(self.max_length, left // (self.kv_per_token * bytes_per_number)))

    def _weight_bytes(self, bytes_per_number: int, quantize: str | None) -> int:
        if quantize == "int8":
            return self.num_linear + self.num_other * bytes_per_number
        return self.num_parameters * bytes_per_number


def footprint(source: str) -> Footprint:
    """Footprint of a model by name, without fetching or reading weights.

    Raises InvalidCheckpoint, also for a preset that has not been fetched yet."""
    config = model_config(source)
    problem = f"{source} is not a causal language model that can be sized"
    with refusing(problem):
        with torch.device("meta"), quiet_transformers():
            model = AutoModelForCausalLM.from_config(config)
        head_dim = (
            getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        )
        linear = {
            id(module.weight): module.weight.numel()
            for module in model.modules()
            if isinstance(module, nn.Linear)
        }
        num_linear = sum(linear.values())
        num_parameters = sum(parameter.numel() for parameter in model.parameters())
        tied = linear.get(id(model.get_input_embeddings().weight), 0)
        return Footprint(
            num_parameters=num_parameters,
            num_linear=num_linear,
            num_other=num_parameters - num_linear + tied,
            kv_per_token=2 * config.num_hidden_layers * config.num_key_value_heads * head_dim,
            max_length=config.max_position_embeddings,
        )


def model_config(source: str) -> Any:
    """The `transformers` config of a model by name, without fetching or reading weights. Raises
    InvalidCheckpoint."""
    path = input_path(source, InvalidCheckpoint)
    if source in PRESETS:
        directory = find_conversion(PRESETS[source].target)
        if directory is None:
            raise InvalidCheckpoint(
                f"preset {source} is not here yet; run `d3d pull {source}` first"
            )
        return load_config(directory)
    if is_preset_file(source) and not path.is_dir():
        return model_config(read_preset(source).target)
    if path.suffix.lower() == ".gguf" and path.is_file():
        with refusing(f"{path} can't be read as a GGUF model"), quiet_transformers():
            return AutoConfig.from_pretrained(
                path.parent, gguf_file=path.name, local_files_only=True
            )
    if is_hub_id(source) and not path.exists():
        return load_config(fetch_config(source))
    return load_config(resolve_model(source))
