"""Costs of passes computed from a device's data sheet and a model's shape.

A pass takes as long as the slower of two things takes: reading all weights and cached keys and
values once, or doing the arithmetic (the roofline model: Williams, Waterman and Patterson,
"Roofline: an insightful visual performance model for multicore architectures", Communications of
the ACM 52(4), 2009). For a decoder:

    bytes = 2 (parameters read + cached keys and values of the context and of the rows)
    flops = rows * 2 * parameters read + rows * 4 * (context + rows) * heads * head_dim * layers
    t     = overhead + max(bytes / (bandwidth * bandwidth_share), flops / (peak * arithmetic_share))

2 operations a parameter and row: Kaplan et al., arXiv 2001.08361, section 2.1; both bounds for
decoding: Pope et al., arXiv 2211.05102, section 2. bfloat16: 2 bytes a number. Real kernels reach a
share of either peak; how large it is is the greatest unknown here."""

from __future__ import annotations

from dataclasses import dataclass, field

from d3d.errors import InvalidRequest
from d3d.lab.plan.costs import APART, ONE_DEVICE, Contention
from d3d.lab.plan.devices import Device, Shape

BYTES = 2
"""Of a bfloat16 number."""


@dataclass(frozen=True)
class Efficiency:
    """What is reached of a data sheet. Shares within 0 and 1, times in seconds."""

    bandwidth_share: float = 0.65
    """7.41 ms a token, which D3D's published rates imply for plain Qwen3-8B in bfloat16, is 0.66 of
    an H100's peak; their hardware is not told."""
    arithmetic_share: float = 0.5
    overhead_s: float = 0.0
    """Of each pass: kernel launches that nothing hides."""
    switch_s: float = 50e-6
    """A message of a few integers each way between two devices of one machine."""

    def __post_init__(self) -> None:
        """Raises InvalidRequest."""
        for name, share in (
            ("bandwidth share", self.bandwidth_share),
            ("arithmetic share", self.arithmetic_share),
        ):
            if not 0 < share <= 1:
                raise InvalidRequest(f"{name}: {share:g} is not above 0 and at most 1")
        for name, seconds in (("overhead", self.overhead_s), ("switch", self.switch_s)):
            if not 0 <= seconds < 10:
                raise InvalidRequest(f"{name}: {seconds:g} s is not within 0 and 10 s")


def pass_bytes(shape: Shape, rows: int, context: float) -> float:
    """What a pass reads, or writes, once."""
    return BYTES * (shape.read_parameters + shape.kv_per_token * (context + rows))


def pass_flops(shape: Shape, rows: int, context: float) -> float:
    attention = 4 * (context + rows) * shape.num_heads * shape.head_dim * shape.num_layers
    return rows * (2 * shape.read_parameters + attention)


def pass_seconds(
    shape: Shape, device: Device, rows: int, context: float, reached: Efficiency
) -> float:
    """The roofline of one pass of `rows` rows behind `context` cached tokens."""
    reading = pass_bytes(shape, rows, context) / (device.bytes_per_s * reached.bandwidth_share)
    return reached.overhead_s + max(
        reading, pass_flops(shape, rows, context) / (device.flops * reached.arithmetic_share)
    )


@dataclass(frozen=True)
class RooflineCosts:
    """A target on one device and its drafter on the same one, or on another of the same kind."""

    target: Shape
    drafter: Shape | None
    device: Device
    num_devices: int = 1
    reached: Efficiency = field(default_factory=Efficiency)
    catch_up: int = 5
    """Committed tokens that a drafter has not seen yet when it drafts; it reads them in the same
    pass."""
    has_fused: bool = False
    """These drafters have weights of their own, so no pass can serve both."""
    has_own_cache: bool = True

    def __post_init__(self) -> None:
        """Raises InvalidRequest where the weights do not fit."""
        if self.num_devices not in (1, 2):
            raise InvalidRequest(
                f"devices: {self.num_devices} is not 1 or 2; one model on several devices is not modelled"
            )
        drafter = 0 if self.drafter is None else weight_bytes(self.drafter)
        shares = (
            [weight_bytes(self.target) + drafter]
            if self.num_devices == 1
            else [weight_bytes(self.target), drafter]
        )
        if max(shares) > self.device.num_bytes:
            raise InvalidRequest(
                f"{self.device.name}: {max(shares) / 1e9:.0f} GB of weights in bfloat16 do not fit its {self.device.num_bytes / 1e9:.0f} GB"
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

    @property
    def rest_s(self) -> float:
        return 0.0

    def verify(self, rows: int, context: float) -> float:
        return pass_seconds(self.target, self.device, rows, context, self.reached)

    def draft(self, draft_length: int, context: float) -> float:
        """Rows: tokens to catch up with, the anchor among them, and slots; alignment `same`, as far
        as is known of D3D."""
        return self._drafter_pass(self.catch_up + draft_length, context)

    def packed(self, draft_length: int, outcomes: int, context: float) -> float:
        """Rows: tokens to catch up with, the draft, and for each outcome its anchor, its slots and
        a guess slot (docs/async.md)."""
        return self._drafter_pass(
            self.catch_up + draft_length + outcomes * (draft_length + 2), context
        )

    def fused(self, rows: int, context: float) -> float:  # noqa: ARG002 - the protocol's
        raise InvalidRequest(
            "fused: a drafter with weights of its own can't share the target's pass"
        )

    def read(self, context: float) -> float:
        """The prompt as rows of one pass; rather high, since the head is counted for each of
        them."""
        return self._drafter_pass(max(1, round(context)), 0.0)

    def _drafter_pass(self, rows: int, context: float) -> float:
        if self.drafter is None:
            raise InvalidRequest(
                "drafter: name one; without it there is only plain decoding to model"
            )
        return pass_seconds(self.drafter, self.device, rows, context, self.reached)


def weight_bytes(shape: Shape) -> float:
    """Of a whole model in bfloat16, with an embedding table beside the head."""
    return BYTES * (shape.read_parameters + shape.head_parameters)
