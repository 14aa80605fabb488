"""A draft thread's own stream on a CUDA device. It has run on no GPU yet."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from d3d.engine.clock import PassClock, ProcessorClock, cuda_clock


@contextmanager
def on_the_processor() -> Iterator[PassClock]:
    """Nothing is arranged: the thread works as the others do."""
    yield ProcessorClock()


@contextmanager
def on_one_core() -> Iterator[PassClock]:
    """One torch thread for a draft thread on a CPU. With more it would have a pool of its own, and
    once two pools hold more threads than there are cores, OpenMP's threads go to sleep between
    products: everything else in this process would take 1.7 times as long (docs/log.md), for as
    long as the draft thread lives, at work or not."""
    torch.set_num_threads(1)  # of this thread; `TargetThreads` says the others' number again
    yield ProcessorClock()


@contextmanager
def on_own_stream(device: torch.device) -> Iterator[PassClock]:
    """What this thread asks of the device runs beside what others ask of it, once all that has been
    asked before is done (the drafter's weights, for one). Every answer of a worker is read back
    from the device, so none of its work outlasts the answer."""
    stream = torch.cuda.Stream(device)
    with torch.cuda.device(device), torch.cuda.stream(stream):
        stream.wait_stream(torch.cuda.default_stream(device))
        yield cuda_clock(device)
