"""Passes of a decoder through the C library."""

from __future__ import annotations

import ctypes
import os
import threading
import weakref
from collections.abc import Mapping, Sequence
from ctypes import c_float, c_int, c_int32, c_uint8, c_void_p
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from d3d.model.config import DecoderConfig
from d3d.native import library as c
from d3d.native.build import NativeUnavailable
from d3d.native.weights import (
    MATRICES,
    NORMS,
    StoredMatrix,
    Weights,
    gguf_weights,
    tensor_weights,
)

PANEL = 64
"""Logits of a row take a multiple of this many floats in memory."""


class NativeRows(NamedTuple):
    """Outcome of a pass for the rows that were asked for."""

    argmax: Tensor
    """int32 [rows]: best of the tokenizer's tokens, the lowest id among equals."""
    finite: Tensor
    """bool [rows]: True if the logits of the tokenizer's tokens are finite."""
    logits: Tensor | None
    """float32 [rows, num_tokens], or None if they were not asked for."""


class NativePass:
    """A decoder in the C library, with the key-value caches of its sequences.

    Batch-invariant: a row's bits depend on the tokens that it sees and on their positions only.
    One pass runs at a time; further threads wait."""

    def __init__(
        self, config: DecoderConfig, weights: Weights, *, threads: int | None = None
    ) -> None:
        """threads: default as many as torch uses, at most those that this process may run on.
        Raises NativeUnavailable, MemoryError."""
        self.config = config
        self._library = c.library()
        self._lock = threading.Lock()
        self._caches: dict[int, int] = {}
        self._lengths: dict[int, int] = {}
        self._model = _new_model(
            self._library, config, default_threads() if threads is None else threads
        )
        self._close = weakref.finalize(self, _free, self._library, self._model, self._caches)
        self._fill(weights)

    @classmethod
    def from_gguf(
        cls, path: Path, config: DecoderConfig, *, threads: int | None = None
    ) -> NativePass:
        """The quantised weights of a GGUF file, as they are."""
        return cls(config, gguf_weights(path, config), threads=threads)

    @classmethod
    def from_tensors(
        cls, tensors: Mapping[str, Tensor], config: DecoderConfig, *, threads: int | None = None
    ) -> NativePass:
        """Float weights by Hugging Face name, each in its own dtype."""
        return cls(config, tensor_weights(tensors), threads=threads)

    @property
    def level(self) -> str:
        """Instruction set of the library: avx512, avx2, neon or generic."""
        return str(self._library.d3d_level().decode())

    def close(self) -> None:
        """Free weights, caches and threads; the object can't be used afterwards."""
        self._close()

    def set_threads(self, threads: int) -> None:
        with self._lock:
            c.check(self._library.d3d_set_threads(self._model, threads), "setting threads")

    def __len__(self) -> int:
        return len(self._caches)

    def __contains__(self, sequence_id: object) -> bool:
        return sequence_id in self._caches

    def length(self, sequence_id: int) -> int:
        """Tokens in a sequence's cache."""
        return self._lengths[sequence_id]

    def open(self, sequence_id: int, capacity: int = 0) -> None:
        """Begin an empty sequence. capacity: its expected length in tokens; it may grow beyond.
        Raises ValueError for an id in use."""
        if sequence_id in self._caches:
            raise ValueError(f"sequence {sequence_id} is open already")
        cache = self._library.d3d_cache_new(self._model, capacity)
        if not cache:
            raise MemoryError("out of memory for a sequence's keys and values")
        self._caches[sequence_id], self._lengths[sequence_id] = cache, 0

    def end(self, sequence_id: int) -> None:
        """Forget a sequence; unknown ids are ignored."""
        with self._lock:
            if (cache := self._caches.pop(sequence_id, None)) is not None:
                self._library.d3d_cache_free(cache)
                del self._lengths[sequence_id]

    def crop(self, sequence_id: int, length: int) -> None:
        """Forget a sequence's tokens from `length` on; a longer length changes nothing."""
        self._lengths[sequence_id] = min(self._lengths[sequence_id], length)

    def keep(self, sequence_id: int, first: int, places: Sequence[int]) -> None:
        """Keep the first `first` tokens and then those at `places`, which ascend; forget the rest.
        A kept token keeps the position that it had in its pass."""
        end = self._lengths[sequence_id]
        if first < 0 or any(not first <= place < end for place in places):
            raise ValueError(f"places must lie between {first} and {end}: {list(places)}")
        with self._lock:
            status = self._library.d3d_cache_move(
                self._caches[sequence_id], first, len(places), _ints(places)
            )
        c.check(status, "moving cached tokens")
        self._lengths[sequence_id] = first + len(places)

    def forward(
        self,
        ids: Sequence[int],
        token_ids: Sequence[Sequence[int]],
        *,
        wanted: Sequence[int] | None = None,
        masks: Sequence[Tensor | None] | None = None,
        positions: Sequence[Sequence[int]] | None = None,
        with_logits: bool = True,
    ) -> NativeRows:
        """Append tokens to sequences.

        wanted: rows whose logits are computed, counted over all sequences' rows in order (default:
        all). masks: for each sequence bool [rows, length + rows], True = visible, or None =
        causal. positions: for the rotary embedding (default: the places in the cache)."""
        rows = sum(len(tokens) for tokens in token_ids)
        chosen = list(range(rows)) if wanted is None else list(wanted)
        with self._lock:
            lengths = [self._lengths[sequence_id] for sequence_id in ids]
            call, outcome, kept = self._call(ids, token_ids, lengths, chosen, with_logits)
            if positions is not None:
                if [len(each) for each in positions] != [len(each) for each in token_ids]:
                    raise ValueError("positions need one entry for each token")
                call.positions = _ints([place for each in positions for place in each])
            if masks is not None:
                arrays = [
                    _mask(mask, len(tokens), length)
                    for mask, tokens, length in zip(masks, token_ids, lengths, strict=True)
                ]
                kept.append(arrays)
                call.masks = (c_void_p * len(arrays))(
                    *(None if each is None else each.ctypes.data for each in arrays)
                )
            c.check(self._library.d3d_run(self._model, ctypes.byref(call)), "running a pass")
            for sequence_id, tokens in zip(ids, token_ids, strict=True):
                self._lengths[sequence_id] += len(tokens)
        return outcome

    def _call(
        self,
        ids: Sequence[int],
        token_ids: Sequence[Sequence[int]],
        lengths: list[int],
        wanted: list[int],
        with_logits: bool,
    ) -> tuple[c.CPass, NativeRows, list[Any]]:
        """A causal pass, where it writes its outcome, and what must live as long."""
        if len(set(ids)) != len(ids):
            raise ValueError(f"a sequence occurs twice in a pass: {list(ids)}")
        first_rows: list[int] = [0]
        positions: list[int] = []
        for tokens, length in zip(token_ids, lengths, strict=True):
            first_rows.append(first_rows[-1] + len(tokens))
            positions.extend(range(length, length + len(tokens)))
        stride = -(-self.config.vocab_size // PANEL) * PANEL
        best = torch.empty(len(wanted), dtype=torch.int32)
        finite = torch.empty(len(wanted), dtype=torch.bool)
        logits = torch.empty(len(wanted), stride) if with_logits else None
        caches = (c_void_p * len(ids))(*(self._caches[sequence_id] for sequence_id in ids))
        call = c.CPass(
            version=c.VERSION,
            num_rows=first_rows[-1],
            num_sequences=len(ids),
            num_wanted=len(wanted),
            token_ids=_ints([token for tokens in token_ids for token in tokens]),
            positions=_ints(positions),
            caches=caches,
            first_rows=_ints(first_rows),
            past=_ints(lengths),
            wanted=_ints(wanted),
            logits=None if logits is None else logits.data_ptr(),
            logits_stride=stride,
            argmax=ctypes.cast(best.data_ptr(), ctypes.POINTER(c_int32)),
            finite=ctypes.cast(finite.data_ptr(), ctypes.POINTER(c_uint8)),
        )
        shown = None if logits is None else logits[:, : self.config.num_tokens]
        return call, NativeRows(best, finite, shown), [logits]

    def _fill(self, weights: Weights) -> None:
        """Pack all weights, one after the other."""
        config = self.config
        self._set_matrix(-1, c.EMBEDDING, "model.embed_tokens", weights)
        if weights.has("lm_head.weight") and not config.tied:
            self._set_matrix(-1, c.HEAD, "lm_head", weights)
        elif not config.tied:
            raise NativeUnavailable("tensor lm_head.weight is missing; fetch the model again")
        self._set_norm(-1, c.FINAL_NORM, "model.norm", weights)
        for layer in range(config.num_layers):
            for name, which in MATRICES.items():
                self._set_matrix(layer, which, f"model.layers.{layer}.{name}", weights)
            for name, which in NORMS.items():
                if config.family == "qwen3" or which not in (c.Q_NORM, c.K_NORM):
                    self._set_norm(layer, which, f"model.layers.{layer}.{name}", weights)

    def _set_matrix(self, layer: int, which: int, name: str, weights: Weights) -> None:
        stored: StoredMatrix = weights.matrix(f"{name}.weight")
        kind = c.FORMATS.index(stored.format)
        data = np.ascontiguousarray(stored.data)
        if self._library.d3d_row_bytes(kind, stored.columns) * stored.rows != data.nbytes:
            raise NativeUnavailable(
                f"{name}: {stored.format} can't hold {stored.rows} rows of {stored.columns} columns"
            )
        bias = weights.vector(f"{name}.bias") if weights.has(f"{name}.bias") else None
        status = self._library.d3d_set_matrix(
            self._model,
            layer,
            which,
            kind,
            stored.rows,
            stored.columns,
            data.ctypes.data,
            None if bias is None else bias.ctypes.data,
            stored.permuted_heads,
        )
        _check_weight(status, name)

    def _set_norm(self, layer: int, which: int, name: str, weights: Weights) -> None:
        values = weights.vector(f"{name}.weight")
        status = self._library.d3d_set_norm(
            self._model, layer, which, values.size, values.ctypes.data
        )
        _check_weight(status, name)


def default_threads() -> int:
    """As many threads as torch uses, at most the processors that this process may run on."""
    allowed = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    return max(1, min(torch.get_num_threads(), allowed))


def _new_model(library: ctypes.CDLL, config: DecoderConfig, threads: int) -> int:
    if threads < 1:
        raise ValueError(f"threads must be 1 or more, not {threads}")
    frequencies = (c_float * len(config.inv_freq))(*config.inv_freq)
    shape = c.CShape(
        c.VERSION,
        config.vocab_size,
        config.hidden_size,
        config.intermediate_size,
        config.num_layers,
        config.num_heads,
        config.num_kv_heads,
        config.head_dim,
        config.num_tokens,
        config.norm_eps,
        config.rope_scale,
        frequencies,
    )
    status = c_int()
    model = library.d3d_model_new(ctypes.byref(shape), threads, ctypes.byref(status))
    if status.value == c.BAD_ARGUMENT:
        raise NativeUnavailable(f"the C library can't hold a model of this shape: {config}")
    c.check(status.value, "making a model")
    return int(model)


def _free(library: ctypes.CDLL, model: int, caches: dict[int, int]) -> None:
    for cache in caches.values():
        library.d3d_cache_free(cache)
    caches.clear()
    library.d3d_model_free(model)


def _check_weight(status: int, name: str) -> None:
    if status == c.BAD_ARGUMENT:
        raise NativeUnavailable(f"{name} does not have the size that the config says")
    c.check(status, f"packing {name}")


def _ints(values: Sequence[int]) -> ctypes.Array[c_int32]:
    return (c_int32 * len(values))(*values)


def _mask(mask: Tensor | None, rows: int, length: int) -> NDArray[Any] | None:
    if mask is None:
        return None
    if mask.dtype is not torch.bool or mask.shape != (rows, length + rows):
        raise ValueError(
            f"the mask must be bool [{rows}, {length + rows}], not {mask.dtype} {list(mask.shape)}"
        )
    return np.ascontiguousarray(mask.numpy())
