"""Cost of a training step: floating-point operations, and bytes kept for the backward pass, counted
on models of the device `meta`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from d3d.hub.open_model import tensor_shapes
from d3d.model.config import decoder_config
from d3d.model.drafter import DrafterConfig, DrafterModel
from d3d.model.from_target import from_target, linear_layers
from d3d.model.transformer import Transformer
from d3d.train.blocks import clean_pass, hang_blocks, joint_pass, slot_pass
from d3d.train.losses import HEAD_ROWS

T = TypeVar("T")

HEAD_COPIES = 4
"""Tensors of the logits' shape that exist at one time: logits, softmax, error and an
intermediate."""


class AnswerShape(NamedTuple):
    """Sizes of one answer in training; means over a corpus need not be integers."""

    length: float
    """Tokens of prompt and answer."""
    answer: float
    anchors: float
    num_slots: int
    """Slots a block."""

    @property
    def slots(self) -> float:
        return self.anchors * self.num_slots


def blank_transformer(hf_config: Any, dtype: torch.dtype) -> Transformer:
    """A model of a `transformers` config without memory, which can't compute. Raises
    InvalidCheckpoint."""
    config = decoder_config(hf_config)
    tensors = {
        name: torch.empty(shape, device="meta", dtype=dtype)
        for name, shape in tensor_shapes(hf_config).items()
    }
    return Transformer(config, tensors)


def blank_drafter(base: Transformer, config: DrafterConfig) -> DrafterModel:
    """As `from_target`, of a blank base; full weights are in the compute dtype."""
    model = from_target(base, config)
    if config.delta is not None:
        for parameter in model.trainable().values():
            parameter.data = parameter.data.float()
    return model


def answer_flops(model: DrafterModel, shape: AnswerShape, *, computed_twice: bool = False) -> float:
    """Operations of forward and backward for one answer: 2 per weight and row, as many for the
    gradients of inputs, and as many for those of trained weights. Attention counts all scores,
    masked ones included."""
    c, drafter = model.transformer.config, model.config
    linear, num_layers = linear_layers(model).values(), len(model.transformer.layers)
    weights: float = sum(layer.weight.numel() for layer in linear)
    parts = [part for layer in linear for part in (layer.down, layer.up) if part is not None]
    deltas = sum(part.numel() for part in parts)
    scores_a_key: float = 4 * num_layers * c.num_heads * c.head_dim
    head = 2 * c.vocab_size * c.hidden_size
    if drafter.clean_rows_are_base:
        clean = shape.length * (2 * weights + scores_a_key * shape.length)
        slot_share = 1 - len(drafter.skipped) / num_layers  # layers that slots pass through
        weights, scores_a_key = weights * slot_share, scores_a_key * slot_share
        rows, keys = shape.slots, shape.length + shape.num_slots
        head_rows, passes = shape.slots, 2
    else:
        clean = 0.0
        rows = keys = shape.length + shape.slots
        head_rows = shape.slots + shape.answer
        passes = 3 if drafter.delta is None else 2
    again = 1 if computed_twice else 0
    attention = scores_a_key * keys * (3 + again)
    learned = rows * (2 * weights * (passes + again) + 2 * deltas * (3 + again) + attention)
    return clean + learned + head_rows * head * passes


def kept_bytes(
    model: DrafterModel, length: int, anchors: int, num_slots: int, *, computed_twice: bool = False
) -> int:
    """Bytes that the pass of one answer keeps for the backward pass, and those of its loss.

    Adds up what autograd stores in a forward pass of a blank drafter; with `computed_twice`, each
    layer's input and one layer's activations are kept. Fused attention on a GPU keeps less."""
    token_ids = torch.zeros(length, dtype=torch.int64, device="meta")
    places = torch.zeros(anchors, dtype=torch.int64, device="meta")
    batch = hang_blocks(token_ids, places, num_slots, model.config)
    cache_bytes, clean = 0, None
    if model.config.clean_rows_are_base:
        _, cache = clean_pass(model, token_ids)
        # one storage holds all layers
        cache_bytes = sum(tensor.untyped_storage().nbytes() for tensor in cache.read(0, length))
        slots, inside = saved_bytes(model, lambda: slot_pass(model, cache, batch))
    else:
        both, inside = saved_bytes(model, lambda: joint_pass(model, token_ids, batch))
        clean, slots = both
    if computed_twice:
        layers = len(model.transformer.layers)
        rows = slots.shape[0] + (0 if clean is None else length)
        inside = layers * rows * slots.shape[1] * slots.element_size() + inside // layers
    return inside + cache_bytes + _loss_bytes(model, slots, clean)


def _loss_bytes(model: DrafterModel, slots: Tensor, clean: Tensor | None) -> int:
    vocab_size, size = model.transformer.config.vocab_size, slots.element_size()
    if model.transformer.head.weight.requires_grad:
        rows = slots.shape[0] + (0 if clean is None else clean.shape[0])
        # logits of all rows, in the compute dtype and as float32 with their softmax
        return rows * vocab_size * (2 * size + 2 * 4)
    return HEAD_COPIES * HEAD_ROWS * vocab_size * size + slots.numel() * size


def saved_bytes(model: DrafterModel, work: Callable[[], T]) -> tuple[T, int]:
    """Result of a forward pass, and the bytes that autograd saves in it, without the weights."""
    weights = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
    saved: dict[int, int] = {}

    def save(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in weights:
            saved[storage._cdata] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        result = work()
    return result, sum(saved.values())
