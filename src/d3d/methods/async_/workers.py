"""Draft workers: a thread of this process, perhaps with its own CUDA stream, or a process on its
own CPU cores."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from multiprocessing.connection import Connection
from typing import Protocol

import torch

from d3d.engine.clock import PassClock, ProcessorClock, cuda_clock
from d3d.errors import Disconnected
from d3d.methods.async_.draft_worker import DraftWorker
from d3d.methods.async_.messages import Failed
from d3d.methods.async_.preparer import Preparer
from d3d.methods.async_.transports import PipeTransport, QueueTransport, Transport, in_process_pair
from d3d.processes import ChildProcess

MakePreparer = Callable[[], Preparer]
"""Loads the drafter, in the worker. For a process it must be picklable, without
the program's main module."""

Setting = Callable[[], AbstractContextManager[PassClock]]
"""Context that a worker's thread runs in; it yields the clock of its passes."""


@contextmanager
def on_the_processor() -> Iterator[PassClock]:
    """No arrangements."""
    yield ProcessorClock()


@contextmanager
def on_one_core() -> Iterator[PassClock]:
    """One torch thread, for a draft thread on a CPU.

    With more it would have a thread pool of its own, and once two pools hold more threads than
    there are cores, OpenMP's threads go to sleep between products: everything else in this process
    would take 1.7 times as long (docs/log.md) for as long as the draft thread lives."""
    torch.set_num_threads(1)  # of this thread; `TargetThreads` sets the others' number again
    yield ProcessorClock()


@contextmanager
def on_own_stream(device: torch.device) -> Iterator[PassClock]:
    """A CUDA stream for this thread, so that its work runs beside that of others; it waits for what
    was queued before, such as the drafter's weights.

    A worker reads every answer back from the device, so none of its work outlasts the answer. Not
    yet run on a GPU."""
    stream = torch.cuda.Stream(device)
    with torch.cuda.device(device), torch.cuda.stream(stream):
        stream.wait_stream(torch.cuda.default_stream(device))
        yield cuda_clock(device)


class Worker(Protocol):
    """A running draft worker."""

    @property
    def transport(self) -> Transport:
        """This side's end of the connection."""
        ...

    @property
    def description(self) -> str: ...

    def kill(self) -> None:
        """End it without waiting; a thread goes on until its current pass has ended."""
        ...

    def wait(self, timeout_s: float) -> None:
        """Wait for its end, up to a limit in seconds."""
        ...


class ThreadWorker:
    """Shares the drafter's weights and the processor with the target."""

    description = "draft thread"

    def __init__(self, make: MakePreparer, setting: Setting = on_the_processor) -> None:
        self.transport, theirs = in_process_pair()
        self.thread = threading.Thread(
            target=_run_worker, args=(theirs, make, setting), name="d3d-draft-worker", daemon=True
        )
        self.thread.start()

    def kill(self) -> None:
        self.transport.close()

    def wait(self, timeout_s: float) -> None:
        self.thread.join(timeout_s)


class ProcessWorker:
    """A process with its own copy of the drafter. It does not outlive this one."""

    def __init__(self, make: MakePreparer, cores: list[int]) -> None:
        """cores: those that it may run on, with one torch thread each; empty for any core and
        torch's own number of threads. Raises OSError."""
        self.process = ChildProcess(work_in_process, make, cores)
        self.transport = PipeTransport(self.process.connection)

    @property
    def description(self) -> str:
        return f"draft process {self.process.pid}"

    def kill(self) -> None:
        self.transport.close()
        self.process.kill()

    def wait(self, timeout_s: float) -> None:
        self.process.wait(timeout_s)


def work_in_process(connection: Connection, make: MakePreparer, cores: list[int]) -> None:
    """The main function of a worker's process."""
    _use_cores(cores)
    transport = PipeTransport(connection)
    _run_worker(transport, make, on_the_processor)
    transport.wait_closed(5.0)


def _run_worker(
    transport: PipeTransport | QueueTransport, make: MakePreparer, setting: Setting
) -> None:
    with ExitStack() as stack:
        stack.callback(transport.close)  # the other side must not wait, however this ends
        try:
            clock = stack.enter_context(setting())
            preparer = make()
        except Exception as error:  # the coordinator reports it
            with suppress(Disconnected):
                transport.send(Failed(None, 0, f"{type(error).__name__}: {error}"))
            return
        DraftWorker(transport, preparer, clock).run()


def _use_cores(cores: list[int]) -> None:
    if not cores:
        return
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cores)
    torch.set_num_threads(len(cores))
