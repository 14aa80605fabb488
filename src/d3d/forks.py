"""Torch in a process that was forked after its parent had loaded a model.

OpenMP's threads stay behind in the parent, and a pass that needs them would wait for ever. So such
a process has one torch thread."""

from __future__ import annotations

import functools
import os

import torch

_loaders: set[int] = set()
"""Processes that have loaded a model: this one, and those that it was forked from."""


def prepare_for_forks() -> None:
    """Call before a model is loaded."""
    _loaders.add(os.getpid())
    if hasattr(os, "register_at_fork"):
        _prepare()


@functools.cache
def _prepare() -> None:
    os.register_at_fork(after_in_child=lambda: torch.set_num_threads(1))


def set_num_threads(num_threads: int) -> None:
    """Set torch's number of threads; no effect in a process that was forked after a model had been
    loaded."""
    if not _loaders - {os.getpid()}:
        torch.set_num_threads(num_threads)
