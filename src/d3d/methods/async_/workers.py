"""Where a draft worker runs: a thread of this process, perhaps with a stream of its own, or a
process on CPU cores of its own."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, suppress
from multiprocessing.connection import Connection, wait
from typing import Protocol

from d3d.engine.clock import PassClock
from d3d.errors import Disconnected
from d3d.methods.async_.draft_worker import DraftWorker
from d3d.methods.async_.messages import Failed
from d3d.methods.async_.preparer import Preparer
from d3d.methods.async_.streams import on_the_processor
from d3d.methods.async_.transports import PipeTransport, QueueTransport, Transport, in_process_pair

MakePreparer = Callable[[], Preparer]
"""Loads the drafter, in the worker. For a process it must be picklable."""

Setting = Callable[[], AbstractContextManager[PassClock]]
"""What a worker's thread works within, and the clock of its passes."""


class Worker(Protocol):
    """A running draft worker."""

    @property
    def transport(self) -> Transport:
        """This side's end of the line to it."""
        ...

    @property
    def description(self) -> str: ...

    def kill(self) -> None:
        """End it now, without waiting for it; a thread goes on until the pass that it is in has
        ended."""
        ...

    def wait(self, timeout_s: float) -> None:
        """Until it has ended, but no longer."""
        ...


class ThreadWorker:
    """Shares the drafter's weights, and the processor, with the target."""

    description = "draft thread"

    def __init__(self, make: MakePreparer, setting: Setting = on_the_processor) -> None:
        self.transport, theirs = in_process_pair()
        self.thread = threading.Thread(
            target=_work, args=(theirs, make, setting), name="d3d-draft-worker", daemon=True
        )
        self.thread.start()

    def kill(self) -> None:
        self.transport.close()

    def wait(self, timeout_s: float) -> None:
        self.thread.join(timeout_s)


class ProcessWorker:
    """A fresh interpreter (spawn) with its own copy of the drafter. It does not outlive this
    process."""

    def __init__(self, make: MakePreparer, cores: list[int]) -> None:
        """cores: where it may run, one torch thread each; empty: anywhere, with torch's own number
        of threads."""
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        try:
            self.process = context.Process(
                target=work_in_process,
                args=(theirs, make, cores),
                name="d3d-draft-worker",
                daemon=True,
            )
            self.process.start()
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()  # else its end would not be noticed
        self.transport = PipeTransport(ours)

    @property
    def description(self) -> str:
        return f"draft process {self.process.pid}"

    def kill(self) -> None:
        self.transport.close()
        self.process.kill()
        self.process.join(5.0)

    def wait(self, timeout_s: float) -> None:
        self.process.join(timeout_s)


def work_in_process(connection: Connection, make: MakePreparer, cores: list[int]) -> None:
    """The main function of a worker's process."""
    threading.Thread(target=_end_with_parent, name="d3d-parent-watch", daemon=True).start()
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # Ctrl-C is for the parent, which then ends this process
    _settle_on(cores)
    transport = PipeTransport(connection)
    _work(transport, make, on_the_processor)
    transport.wait_closed(5.0)


def _work(transport: PipeTransport | QueueTransport, make: MakePreparer, setting: Setting) -> None:
    with ExitStack() as stack:
        stack.callback(transport.close)  # however this ends, the other side must not wait for it
        try:
            clock = stack.enter_context(setting())
            preparer = make()
        except Exception as error:  # the coordinator has to hear of it, whatever it is
            with suppress(Disconnected):
                transport.send(Failed(None, 0, f"{type(error).__name__}: {error}"))
            return
        DraftWorker(transport, preparer, clock).run()


def _end_with_parent() -> None:
    """Even in the middle of a pass, or where the drafter hangs."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)


def _settle_on(cores: list[int]) -> None:
    if not cores:
        return
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cores)
    import torch

    torch.set_num_threads(len(cores))
