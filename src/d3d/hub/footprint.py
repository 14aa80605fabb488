"""How much memory a model takes, from its config alone."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from d3d.errors import InvalidCheckpoint
from d3d.hub.converted import converted_directory, is_converted
from d3d.hub.loading import load_config, resolve_model
from d3d.hub.names import fetch_config, is_hub_id
from d3d.hub.preset_file import is_preset_file, preset_path, read_preset
from d3d.hub.presets import PRESETS
from d3d.hub.quiet import first_line, quiet_transformers


@dataclass(frozen=True)
class Footprint:
    """Counts of numbers; times the bytes of a dtype they are memory."""

    num_parameters: int
    num_linear: int
    """Of linear layers, the head among them, even where it is the embedding: what `quantize`
    rounds."""
    num_other: int
    """Of what stays as it is then: embedding, norms, biases."""
    kv_per_token: int
    """Cached keys and values of one token of one sequence, all layers."""
    max_length: int
    """Longest sequence in tokens."""

    def num_bytes(self, context: int, bytes_per_number: int, quantize: str | None = None) -> int:
        """Weights and the cache of one sequence of `context` tokens."""
        return (
            self._weight_bytes(bytes_per_number, quantize)
            + self.kv_per_token * context * bytes_per_number
        )

    def longest_context(
        self, num_bytes: int, bytes_per_number: int, quantize: str | None = None
    ) -> int:
        """Most tokens of one sequence that fit beside the weights; 0 where not even the weights
        fit."""
        left = num_bytes - self._weight_bytes(bytes_per_number, quantize)
        return max(0, min(self.max_length, left // (self.kv_per_token * bytes_per_number)))

    def _weight_bytes(self, bytes_per_number: int, quantize: str | None) -> int:
        if quantize == "int8":
            return self.num_linear + self.num_other * bytes_per_number
        return self.num_parameters * bytes_per_number


def footprint(source: str) -> Footprint:
    """Of the model that `source` names, as `resolve_model` takes it, without fetching or reading
    weights.

    Raises InvalidCheckpoint, also for a preset that has not been fetched yet.
    """
    config = model_config(source)
    try:
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
        table = model.get_input_embeddings().weight
        num_parameters = sum(parameter.numel() for parameter in model.parameters())
        return Footprint(
            num_parameters=num_parameters,
            num_linear=sum(linear.values()),
            num_other=num_parameters - sum(linear.values()) + linear.get(id(table), 0),
            kv_per_token=2 * config.num_hidden_layers * config.num_key_value_heads * head_dim,
            max_length=config.max_position_embeddings,
        )
    except (ValueError, AttributeError, TypeError, ImportError) as error:
        raise InvalidCheckpoint(
            f"{source} is not a causal language model that can be sized: {first_line(error)}"
        ) from error


def model_config(source: str) -> Any:
    """The `transformers` config of the model that `source` names; weights are neither fetched nor
    read. Raises InvalidCheckpoint."""
    path = Path(source).expanduser()
    if source in PRESETS:
        target = PRESETS[source].target
        directory = converted_directory(target.stem, target.sha256)
        if not is_converted(directory, target.sha256):
            raise InvalidCheckpoint(
                f"preset {source} is not here yet; run `d3d pull {source}` first"
            )
        return load_config(directory)
    if is_preset_file(source) and not path.is_dir():
        return model_config(read_preset(source).target)
    if path.suffix.lower() == ".gguf" and path.is_file():
        try:
            with quiet_transformers():
                return AutoConfig.from_pretrained(
                    path.parent, gguf_file=path.name, local_files_only=True
                )
        except Exception as error:  # transformers raises many kinds for files that it can't read
            raise InvalidCheckpoint(
                f"{path} can't be read as a GGUF model: {first_line(error)}"
            ) from error
    if is_hub_id(source) and not path.exists():
        return load_config(fetch_config(source))
    return load_config(resolve_model(source))


def is_here(source: str) -> bool:
    """Whether a model's files are on this machine, so that opening it fetches and converts
    nothing."""
    if source in PRESETS:
        return is_converted(
            converted_directory(PRESETS[source].target.stem, PRESETS[source].target.sha256),
            PRESETS[source].target.sha256,
        )
    path = Path(source).expanduser()
    return (
        is_here(read_preset(source).target)
        if is_preset_file(source) and preset_path(source).is_file()
        else path.is_dir()
    )
