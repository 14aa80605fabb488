"""Connections between coordinator and worker: within a process, and through a pipe. Both pass one
contract test."""

from __future__ import annotations

import queue
import threading
import time
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Protocol

from d3d.errors import Disconnected

MOST_WAITING = 4096
"""Messages that may queue; a side that is so far behind counts as gone."""

_END = object()
"""Follows the last message."""


class Transport(Protocol):
    """One end of a connection. Messages arrive whole and in order, or not at all."""

    def send(self, message: object) -> None:
        """Never waits for the other side. Raises Disconnected if the connection is known to be
        gone."""
        ...

    def receive(self, timeout_s: float) -> object | None:
        """The next message; None after `timeout_s` seconds without one. Raises Disconnected if none
        can come any more."""
        ...

    def close(self) -> None:
        """Disconnect. The other side still receives what was sent before."""
        ...


class QueueTransport:
    """One end of a connection within a process."""

    def __init__(
        self, incoming: queue.Queue[object], outgoing: queue.Queue[object], ended: threading.Event
    ) -> None:
        self._incoming, self._outgoing = incoming, outgoing
        self._ended = ended

    def send(self, message: object) -> None:
        if self._ended.is_set():
            raise Disconnected
        _put(self._outgoing, message)

    def receive(self, timeout_s: float) -> object | None:
        return _get(self._incoming, timeout_s, self._ended)

    def close(self) -> None:
        self._ended.set()
        for messages in (self._outgoing, self._incoming):
            _put_end(messages)


def in_process_pair() -> tuple[QueueTransport, QueueTransport]:
    """Both ends of a connection."""
    there: queue.Queue[object] = queue.Queue(MOST_WAITING)
    back: queue.Queue[object] = queue.Queue(MOST_WAITING)
    ended = threading.Event()
    return QueueTransport(back, there, ended), QueueTransport(there, back, ended)


class PipeTransport:
    """One end of a pipe. Two threads move the messages, so that neither a full pipe nor half a
    message blocks the caller."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._incoming: queue.Queue[object] = queue.Queue(MOST_WAITING)
        self._outgoing: queue.Queue[object] = queue.Queue(MOST_WAITING)
        self._ended = threading.Event()
        self._closing = threading.Event()
        self._writer = threading.Thread(target=self._write, name="d3d-pipe-writer", daemon=True)
        self._reader = threading.Thread(target=self._read, name="d3d-pipe-reader", daemon=True)
        self._writer.start()
        self._reader.start()

    def send(self, message: object) -> None:
        if self._closing.is_set() or self._ended.is_set():
            raise Disconnected
        _put(self._outgoing, message)

    def receive(self, timeout_s: float) -> object | None:
        return _get(self._incoming, timeout_s, self._ended)

    def close(self) -> None:
        self._closing.set()
        _put_end(self._outgoing)

    def wait_closed(self, timeout_s: float) -> None:
        """After `close`: wait until everything has been sent."""
        self._reader.join(timeout_s)

    def _write(self) -> None:
        try:
            while (message := self._outgoing.get()) is not _END:
                self._connection.send(message)
        except (OSError, ValueError):  # the other side is gone, or this one closed in mid-message
            pass
        finally:
            self._closing.set()

    def _read(self) -> None:
        try:
            while not self._closing.is_set():
                if self._connection.poll(0.2):
                    _put(self._incoming, self._connection.recv())
        except (EOFError, OSError, Disconnected):
            pass
        finally:  # whatever ends it, out of memory included: wake the threads that wait
            self._ended.set()
            _put_end(self._outgoing)
            _put_end(self._incoming)
            self._writer.join(5.0)
            self._connection.close()


def _put(messages: queue.Queue[object], message: object) -> None:
    try:
        messages.put_nowait(message)
    except queue.Full as error:
        raise Disconnected from error


def _put_end(messages: queue.Queue[object]) -> None:
    """Wake the receiver; nobody waits at a full queue."""
    with suppress(queue.Full):
        messages.put_nowait(_END)


def _get(messages: queue.Queue[object], timeout_s: float, ended: threading.Event) -> object | None:
    """The next message; those sent before the end are still delivered."""
    deadline = time.perf_counter() + timeout_s
    while True:
        try:
            left = deadline - time.perf_counter()
            message = messages.get(timeout=left) if left > 0 else messages.get_nowait()
        except queue.Empty:
            if ended.is_set():
                raise Disconnected from None
            return None
        if message is not _END:
            return message
        if messages.empty():
            _put_end(messages)
            raise Disconnected
