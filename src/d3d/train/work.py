"""What a training step takes: floating-point operations, and bytes kept for backward. Counted on
models without memory (`meta`)."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from d3d.hub.open_model import tensor_shapes
from d3d.model.config import decoder_config
from d3d.model.drafter import DrafterConfig, DrafterModel
from d3d.model.from_target import from_target, linear_layers
from d3d.model.transformer import Transformer
from d3d.train.blocks import clean_pass, hang_blocks, joint_pass, slot_pass
from d3d.train.losses import HEAD_ROWS

HEAD_COPIES = 4
"""Tensors of the logits' shape that exist at one time: logits, softmax, error and one on the
way."""


class AnswerShape(NamedTuple):
    """One answer in training. Means over a corpus need not be whole."""

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
    """A model of this `transformers` config that takes no memory and can't compute. Raises
    InvalidCheckpoint."""
    config = decoder_config(hf_config)
    tensors = {
        name: torch.empty(shape, device="meta", dtype=dtype)
        for name, shape in tensor_shapes(hf_config).items()
    }
    return Transformer(config, tensors)


def blank_drafter(base: Transformer, config: DrafterConfig) -> DrafterModel:
    """As `from_target`, of a blank base; its full weights are in the dtype that is computed in."""
    model = from_target(base, config)
    if config.delta is not None:
        for parameter in model.trainable().values():
            parameter.data = parameter.data.float()
    return model


def answer_flops(model: DrafterModel, shape: AnswerShape, *, computed_twice: bool = False) -> float:
    """Operations of forward and backward of one answer: 2 for each weight and row, as much again
    for the gradients of inputs, and again for those of weights, where they are trained; attention
    counts all scores, masked ones too."""
    c, drafter = model.transformer.config, model.config
    weights: float = sum(layer.weight.numel() for layer in linear_layers(model).values())
    deltas = sum(
        part.numel()
        for layer in linear_layers(model).values()
        for part in (layer.down, layer.up)
        if part is not None
    )
    scores_a_key: float = 4 * len(model.transformer.layers) * c.num_heads * c.head_dim
    head = 2 * c.vocab_size * c.hidden_size
    if drafter.clean_rows_are_base:
        clean = shape.length * (2 * weights + scores_a_key * shape.length)
        going = 1 - len(drafter.skipped) / len(
            model.transformer.layers
        )  # of all layers, those of the slots
        weights, scores_a_key = weights * going, scores_a_key * going
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
    """Bytes that the pass of one answer keeps for backward, and what the loss needs beside them.

    Forward runs on a blank drafter, and what autograd stores is added up; with `computed_twice` a
    layer's input and one layer's inside are kept. Fused attention on a GPU keeps less."""
    token_ids = torch.zeros(length, dtype=torch.int64, device="meta")
    batch = hang_blocks(
        token_ids, torch.zeros(anchors, dtype=torch.int64, device="meta"), num_slots, model.config
    )
    kept = _Kept({parameter.untyped_storage()._cdata for parameter in model.parameters()})
    cache_bytes, clean = 0, None
    if model.config.clean_rows_are_base:
        _, cache = clean_pass(model, token_ids)
        cache_bytes = sum(
            tensor.untyped_storage().nbytes() for tensor in cache.read(0, length)
        )  # one storage holds all layers
        with torch.autograd.graph.saved_tensors_hooks(kept.add, kept.back):
            slots = slot_pass(model, cache, batch)
    else:
        with torch.autograd.graph.saved_tensors_hooks(kept.add, kept.back):
            clean, slots = joint_pass(model, token_ids, batch)
    layers = len(model.transformer.layers)
    inside = kept.num_bytes
    if computed_twice:
        rows = slots.shape[0] + (0 if clean is None else length)
        inside = layers * rows * slots.shape[1] * slots.element_size() + inside // layers
    return inside + cache_bytes + _loss_bytes(model, slots, clean)


def _loss_bytes(model: DrafterModel, slots: Tensor, clean: Tensor | None) -> int:
    vocab_size, size = model.transformer.config.vocab_size, slots.element_size()
    if (
        model.transformer.head.weight.requires_grad
    ):  # logits of all rows, in the compute dtype and as float32 with their softmax
        rows = slots.shape[0] + (0 if clean is None else clean.shape[0])
        return rows * vocab_size * (2 * size + 2 * 4)
    return HEAD_COPIES * HEAD_ROWS * vocab_size * size + slots.numel() * size


class _Kept:
    """Adds up the storages that autograd saves, each once, without those of the weights."""

    def __init__(self, weights: set[int]) -> None:
        self._seen = weights
        self.num_bytes = 0

    def add(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._seen:
            self._seen.add(storage._cdata)
            self.num_bytes += storage.nbytes()
        return tensor

    def back(self, tensor: Tensor) -> Tensor:
        return tensor
