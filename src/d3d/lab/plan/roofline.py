"""Costs of passes computed from a data sheet and a model's shape.

A pass takes as long as the slower of reading all weights and cached keys and values once, and the
arithmetic (the roofline model: Williams, Waterman and Patterson, "Roofline: an insightful visual
performance model for multicore architectures", Communications of the ACM 52(4), 2009):

    bytes = 2 (parameters read + cached keys and values of the context and of the rows)
    flops = rows * 2 * parameters read + rows * 4 * (context + rows) * heads * head_dim * layers
    t     = overhead + max(bytes / (bandwidth * bandwidth_share), flops / (peak * arithmetic_share))

2 operations per parameter and row: Kaplan et al., arXiv 2001.08361, section 2.1; both bounds for
decoding: Pope et al., arXiv 2211.05102, section 2. bfloat16: 2 bytes a number. The shares of the
two peaks that real kernels reach are the greatest unknown."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TypeVar

from d3d.errors import InvalidRequest
from d3d.lab.plan.costs import APART, ONE_DEVICE, Contention
from d3d.model.config import DecoderConfig

BYTES = 2
"""Bytes of a bfloat16 number."""

Known = TypeVar("Known")


@dataclass(frozen=True)
class DataSheet:
    """A device's peaks: dense bfloat16 products with float32 sums, without sparsity."""

    name: str
    bytes_per_s: float
    flops: float
    """Operations per second."""
    num_bytes: float


DATA_SHEETS: dict[str, DataSheet] = {
    # NVIDIA's data sheets: H100 and A100 as SXM with 80 GB, H200 SXM, L40S; RTX 4090: the Ada
    # architecture white paper, appendix A.
    "h100": DataSheet("H100", 3.35e12, 989e12, 80e9),
    "h200": DataSheet("H200", 4.8e12, 989e12, 141e9),
    "a100": DataSheet("A100", 2.039e12, 312e12, 80e9),
    "l40s": DataSheet("L40S", 0.864e12, 362e12, 48e9),
    "rtx4090": DataSheet("RTX 4090", 1.008e12, 165e12, 24e9),
}


@dataclass(frozen=True)
class DecoderShape:
    """The sizes of a Llama, Qwen2 or Qwen3 decoder that its costs depend on, in elements."""

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
        """Parameters of one layer's matrices: query and output, key and value, and the MLP's
        three."""
        attention = 2 * self.hidden_size * self.head_dim * (self.num_heads + self.num_kv_heads)
        return attention + 3 * self.hidden_size * self.intermediate_size

    @property
    def head_parameters(self) -> int:
        return self.vocab_size * self.hidden_size

    @property
    def read_parameters(self) -> int:
        """Parameters that every pass reads: layers and head. Of an embedding table it reads a few
        rows only."""
        return self.num_layers * self.layer_parameters + self.head_parameters

    @property
    def kv_per_token(self) -> int:
        """Cached keys and values of one token, all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim

    @property
    def weight_bytes(self) -> int:
        """Bytes of the whole model in bfloat16, with an embedding table beside the head."""
        return BYTES * (self.read_parameters + self.head_parameters)

    @classmethod
    def of(cls, name: str, config: DecoderConfig, num_layers: int | None = None) -> DecoderShape:
        """num_layers: instead of the configuration's."""
        return cls(
            name,
            config.num_layers if num_layers is None else num_layers,
            config.hidden_size,
            config.intermediate_size,
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            config.vocab_size,
        )

    def thinned(self, num_layers: int) -> DecoderShape:
        """The decoder with fewer layers. Raises InvalidRequest for more than it has."""
        if not 1 <= num_layers <= self.num_layers:
            raise InvalidRequest(
                f"layers: {num_layers} is not within 1 and those of {self.name}, {self.num_layers}"
            )
        if num_layers == self.num_layers:
            return self
        return replace(self, name=f"{self.name}, {num_layers} layers", num_layers=num_layers)


# From the config.json files of Qwen's releases.
QWEN3_1_7B = DecoderShape("Qwen3-1.7B", 28, 2048, 6144, 16, 8, 128, 151936)
QWEN3_8B = DecoderShape("Qwen3-8B", 36, 4096, 12288, 32, 8, 128, 151936)
QWEN3_32B = DecoderShape("Qwen3-32B", 64, 5120, 25600, 64, 8, 128, 151936)

MODELS: dict[str, DecoderShape] = {
    "qwen3-1.7b": QWEN3_1_7B,
    "qwen3-8b": QWEN3_8B,
    "qwen3-32b": QWEN3_32B,
    # D3D's published drafters are trained Qwen3 models; "31D" is the 8 B one with 31 of 36 layers.
    "d3d-1.7b": replace(QWEN3_1_7B, name="D3D-1.7B"),
    "d3d-8b": replace(QWEN3_8B, name="D3D-8B"),
    "d3d-31d-8b": replace(QWEN3_8B, name="D3D-31D-8B", num_layers=31),
}


def find_data_sheet(name: str) -> DataSheet:
    """Raises InvalidRequest, with the known names, for an unknown one."""
    return _find(DATA_SHEETS, name, f"data sheet: {name!r} is not known")


def find_model(name: str) -> DecoderShape:
    """Raises InvalidRequest, with the known names, for an unknown one."""
    return _find(MODELS, name, f"model: no shape is known of {name!r}")


def _find(known: dict[str, Known], name: str, problem: str) -> Known:
    if name.lower() not in known:
        raise InvalidRequest(f"{problem}; there are {', '.join(known)}")
    return known[name.lower()]


@dataclass(frozen=True)
class Efficiency:
    """Fraction of a data sheet's rates that is reached. Shares within 0 and 1, times in seconds."""

    bandwidth_share: float = 0.65
    """D3D's published rates imply 7.41 ms a token for plain Qwen3-8B in bfloat16: 0.66 of an H100's
    peak. Their hardware is not told."""
    arithmetic_share: float = 0.5
    overhead_s: float = 0.0
    """Per pass: kernel launches that nothing hides."""
    switch_s: float = 50e-6
    """A message of a few integers each way between two devices of one machine."""

    def __post_init__(self) -> None:
        """Raises InvalidRequest."""
        shares = {
            "bandwidth share": self.bandwidth_share,
            "arithmetic share": self.arithmetic_share,
        }
        for name, share in shares.items():
            if not 0 < share <= 1:
                raise InvalidRequest(f"{name}: {share:g} is not above 0 and at most 1")
        for name, seconds in {"overhead": self.overhead_s, "switch": self.switch_s}.items():
            if not 0 <= seconds < 10:
                raise InvalidRequest(f"{name}: {seconds:g} s is not within 0 and 10 s")


def pass_bytes(shape: DecoderShape, rows: int, context: float) -> float:
    """Bytes that a pass reads or writes once."""
    return BYTES * (shape.read_parameters + shape.kv_per_token * (context + rows))


def pass_flops(shape: DecoderShape, rows: int, context: float) -> float:
    attention = 4 * (context + rows) * shape.num_heads * shape.head_dim * shape.num_layers
    return rows * (2 * shape.read_parameters + attention)


def pass_seconds(
    shape: DecoderShape, device: DataSheet, rows: int, context: float, reached: Efficiency
) -> float:
    """The roofline of one pass of `rows` rows after `context` cached tokens."""
    reading = pass_bytes(shape, rows, context) / (device.bytes_per_s * reached.bandwidth_share)
    computing = pass_flops(shape, rows, context) / (device.flops * reached.arithmetic_share)
    return reached.overhead_s + max(reading, computing)


@dataclass(frozen=True)
class RooflineCosts:
    """Costs of a target on one device and its drafter on the same one, or on another of its kind.

    Such drafters have weights of their own, so no pass can serve both."""

    target: DecoderShape
    drafter: DecoderShape | None
    device: DataSheet
    num_devices: int = 1
    reached: Efficiency = field(default_factory=Efficiency)
    catch_up: int = 5
    """Committed tokens that are new to a drafter when it drafts; it reads them in the same pass."""
    has_fused: bool = False
    has_own_cache: bool = True
    rest_s: float = 0.0

    def __post_init__(self) -> None:
        """Raises InvalidRequest if the weights do not fit."""
        if self.num_devices not in (1, 2):
            raise InvalidRequest(
                f"devices: {self.num_devices} is not 1 or 2; one model on several devices is not "
                "modelled"
            )
        drafter = 0 if self.drafter is None else self.drafter.weight_bytes
        one_device = self.num_devices == 1
        needed = (
            self.target.weight_bytes + drafter
            if one_device
            else max(self.target.weight_bytes, drafter)
        )
        if needed > self.device.num_bytes:
            raise InvalidRequest(
                f"{self.device.name}: {needed / 1e9:.0f} GB of weights in bfloat16 do not fit its "
                f"{self.device.num_bytes / 1e9:.0f} GB"
            )

    @property
    def has_drafter(self) -> bool:
        return self.drafter is not None

    @property
    def contention(self) -> Contention:
        return APART if self.num_devices == 2 else ONE_DEVICE

    @property
    def switch_s(self) -> float:
        return self.reached.switch_s

    def verify(self, rows: int, context: float) -> float:
        return pass_seconds(self.target, self.device, rows, context, self.reached)

    def draft(self, draft_length: int, context: float) -> float:
        """Rows: tokens to catch up with, the anchor among them, and slots (alignment `same`, which
        D3D seems to use)."""
        return self._drafter_pass(self.catch_up + draft_length, context)

    def packed(self, draft_length: int, outcomes: int, context: float) -> float:
        """Rows: tokens to catch up with, the draft, and for each outcome its anchor, its slots and
        a guess slot (docs/async.md)."""
        rows = self.catch_up + draft_length + outcomes * (draft_length + 2)
        return self._drafter_pass(rows, context)

    def fused(self, rows: int, context: float) -> float:  # noqa: ARG002 - the protocol's
        raise InvalidRequest(
            "fused: a drafter with weights of its own can't share the target's pass"
        )

    def read(self, context: float) -> float:
        """The prompt as rows of one pass; rather high, since the head is counted for each row."""
        return self._drafter_pass(max(1, round(context)), 0.0)

    def _drafter_pass(self, rows: int, context: float) -> float:
        if self.drafter is None:
            raise InvalidRequest(
                "drafter: name one; without it there is only plain decoding to model"
            )
        return pass_seconds(self.drafter, self.device, rows, context, self.reached)
