"""The C library's functions and structs (csrc/d3d.h), for ctypes."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_char_p, c_float, c_int, c_int32, c_int64, c_uint8, c_void_p
from functools import cache

from d3d.native.build import NativeUnavailable, load

VERSION = 1
OK, NO_MEMORY, BAD_ARGUMENT, NO_THREADS = range(4)
FORMATS = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q6_K")
"""Names as in GGUF, in the order of `d3d_format`."""

Q, K, V, OUT, GATE, UP, DOWN, EMBEDDING, HEAD = range(9)
ATTENTION_NORM, MLP_NORM, Q_NORM, K_NORM, FINAL_NORM = range(5)


class CShape(ctypes.Structure):
    """`d3d_shape`."""

    _fields_ = (
        ("version", c_int32),
        ("vocab_size", c_int32),
        ("hidden_size", c_int32),
        ("intermediate_size", c_int32),
        ("num_layers", c_int32),
        ("num_heads", c_int32),
        ("num_kv_heads", c_int32),
        ("head_dim", c_int32),
        ("num_tokens", c_int32),
        ("norm_eps", c_float),
        ("rope_scale", c_float),
        ("inv_freq", POINTER(c_float)),
    )


class CPass(ctypes.Structure):
    """`d3d_pass`."""

    _fields_ = (
        ("version", c_int32),
        ("num_rows", c_int32),
        ("num_sequences", c_int32),
        ("num_wanted", c_int32),
        ("token_ids", POINTER(c_int32)),
        ("positions", POINTER(c_int32)),
        ("caches", POINTER(c_void_p)),
        ("first_rows", POINTER(c_int32)),
        ("past", POINTER(c_int32)),
        ("masks", POINTER(c_void_p)),
        ("wanted", POINTER(c_int32)),
        ("logits", c_void_p),
        ("logits_stride", c_int64),
        ("argmax", POINTER(c_int32)),
        ("finite", POINTER(c_uint8)),
    )


_SIGNATURES = {
    "d3d_version": (c_int,),
    "d3d_level": (c_char_p,),
    "d3d_model_new": (c_void_p, POINTER(CShape), c_int, POINTER(c_int)),
    "d3d_model_free": (None, c_void_p),
    "d3d_set_matrix": (c_int, c_void_p, *[c_int] * 5, c_void_p, c_void_p, c_int),
    "d3d_set_norm": (c_int, c_void_p, c_int, c_int, c_int, c_void_p),
    "d3d_row_bytes": (c_int64, c_int, c_int),
    "d3d_cache_new": (c_void_p, c_void_p, c_int),
    "d3d_cache_free": (None, c_void_p),
    "d3d_cache_move": (c_int, c_void_p, c_int, c_int, POINTER(c_int32)),
    "d3d_run": (c_int, c_void_p, POINTER(CPass)),
    "d3d_set_threads": (c_int, c_void_p, c_int),
}
"""Result and argument types."""


def library() -> ctypes.CDLL:
    """The loaded library, its functions declared. Raises NativeUnavailable."""
    return _declared(load())


@cache
def _declared(loaded: ctypes.CDLL) -> ctypes.CDLL:
    for name, (result, *arguments) in _SIGNATURES.items():
        function = getattr(loaded, name)
        function.restype, function.argtypes = result, arguments
    if loaded.d3d_version() != VERSION:
        raise NativeUnavailable("the C library in the cache is of another version; delete it")
    return loaded


def check(status: int, doing: str) -> None:
    """Raise what a status of the library means."""
    if status == NO_MEMORY:
        raise MemoryError(f"out of memory while {doing}")
    if status == NO_THREADS:
        raise OSError(f"no more threads can be started while {doing}")
    if status:
        raise ValueError(f"impossible argument while {doing}")
