"""Devices and models by name, as their makers describe them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from d3d.errors import InvalidRequest
from d3d.model.config import DecoderConfig


@dataclass(frozen=True)
class Device:
    """Peaks of the data sheet: dense matrix products in bfloat16 with float32 sums, without
    sparsity."""

    name: str
    bytes_per_s: float
    flops: float
    """Operations a second."""
    num_bytes: float


DEVICES: dict[str, Device] = {
    # NVIDIA's data sheets: H100 and A100 as SXM with 80 GB, H200 SXM, L40S; RTX 4090: the Ada
    # architecture white paper, appendix A.
    "h100": Device("H100", 3.35e12, 989e12, 80e9),
    "h200": Device("H200", 4.8e12, 989e12, 141e9),
    "a100": Device("A100", 2.039e12, 312e12, 80e9),
    "l40s": Device("L40S", 0.864e12, 362e12, 48e9),
    "rtx4090": Device("RTX 4090", 1.008e12, 165e12, 24e9),
}


@dataclass(frozen=True)
class Shape:
    """A decoder of the Llama, Qwen2 or Qwen3 family, as far as its costs go. Sizes in elements."""

    name: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int

    @property
    def layer_parameters(self) -> int:
        """Of one layer's matrices: query and output, key and value, and the MLP's three."""
        attention = 2 * self.hidden_size * self.head_dim * (self.num_heads + self.num_kv_heads)
        return attention + 3 * self.hidden_size * self.intermediate_size

    @property
    def head_parameters(self) -> int:
        return self.vocab_size * self.hidden_size

    @property
    def read_parameters(self) -> int:
        """Those that every pass reads: all layers and the head. Of an embedding table a pass reads
        a few rows only."""
        return self.num_layers * self.layer_parameters + self.head_parameters

    @property
    def kv_per_token(self) -> int:
        """Cached keys and values of one token, all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim

    @classmethod
    def of(cls, name: str, config: DecoderConfig) -> Shape:
        return cls(
            name,
            config.num_layers,
            config.hidden_size,
            config.intermediate_size,
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            config.vocab_size,
        )

    def thinned(self, num_layers: int) -> Shape:
        """With only so many of its layers. Raises InvalidRequest."""
        if not 1 <= num_layers <= self.num_layers:
            raise InvalidRequest(
                f"layers: {num_layers} is not within 1 and those of {self.name}, {self.num_layers}"
            )
        return (
            self
            if num_layers == self.num_layers
            else replace(self, name=f"{self.name}, {num_layers} layers", num_layers=num_layers)
        )


# The config.json files of Qwen's releases.
QWEN3_1_7B = Shape("Qwen3-1.7B", 28, 2048, 6144, 16, 8, 128, 151936)
QWEN3_8B = Shape("Qwen3-8B", 36, 4096, 12288, 32, 8, 128, 151936)
QWEN3_32B = Shape("Qwen3-32B", 64, 5120, 25600, 64, 8, 128, 151936)

MODELS: dict[str, Shape] = {
    "qwen3-1.7b": QWEN3_1_7B,
    "qwen3-8b": QWEN3_8B,
    "qwen3-32b": QWEN3_32B,
    # D3D's published drafters are Qwen3 models, trained; "31D" is the one of 8 B with 31 of its 36
    # layers.
    "d3d-1.7b": replace(QWEN3_1_7B, name="D3D-1.7B"),
    "d3d-8b": replace(QWEN3_8B, name="D3D-8B"),
    "d3d-31d-8b": replace(QWEN3_8B, name="D3D-31D-8B", num_layers=31),
}


def find_device(name: str) -> Device:
    """Raises InvalidRequest that lists the names there are."""
    if name.lower() not in DEVICES:
        raise InvalidRequest(f"device: {name!r} is not known; there are {', '.join(DEVICES)}")
    return DEVICES[name.lower()]


def find_model(name: str) -> Shape:
    """Raises InvalidRequest that lists the names there are."""
    if name.lower() not in MODELS:
        raise InvalidRequest(f"model: no shape is known of {name!r}; there are {', '.join(MODELS)}")
    return MODELS[name.lower()]
