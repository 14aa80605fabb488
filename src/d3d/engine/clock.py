"""When a pass ran, in seconds of `time.perf_counter`: by the processor's clock, or by events in the
queue of a CUDA device.

A CUDA device works on what it was asked for some time ago, so only events know when. They have run
on no GPU yet."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch

Span = tuple[float, float]
"""Start and end in seconds of `time.perf_counter`."""

RENEWED_S = 10.0
"""An event's distance is a float32 in milliseconds: over so many seconds it is exact to a
microsecond."""


class PassClock(Protocol):
    """Times of one queue of work."""

    def mark(self) -> Any:
        """The place behind all that has been asked for; does not wait for it."""
        ...

    def span(self, begun: Any, ended: Any) -> Span:
        """When the queue was at two places; waits until it is at the second."""
        ...


class ProcessorClock:
    """Work that is done when the call returns."""

    def mark(self) -> float:
        return time.perf_counter()

    def span(self, begun: float, ended: float) -> Span:
        return begun, ended


class Event(Protocol):
    """What is used of `torch.cuda.Event`; it has been recorded."""

    def synchronize(self) -> None: ...

    def elapsed_time(self, end_event: Any) -> float:
        """Milliseconds from this one to a later one; both have been reached."""
        ...


class EventMark(NamedTuple):
    event: Event
    origin: Event
    origin_s: float


class EventClock:
    """Times by events; an event whose time by the processor's clock is known ties them to it."""

    def __init__(
        self, record: Callable[[], Event], now: Callable[[], float] = time.perf_counter
    ) -> None:
        """record: puts a new event behind all that has been asked for."""
        self._record, self._now = record, now
        self._origin, self._origin_s = self._tie()

    def mark(self) -> EventMark:
        if self._now() - self._origin_s > RENEWED_S:
            self._origin, self._origin_s = self._tie()
        return EventMark(self._record(), self._origin, self._origin_s)

    def span(self, begun: EventMark, ended: EventMark) -> Span:
        ended.event.synchronize()
        first, last = (
            mark.origin_s + mark.origin.elapsed_time(mark.event) / 1000 for mark in (begun, ended)
        )
        return first, last

    def _tie(self) -> tuple[Event, float]:
        origin = self._record()
        origin.synchronize()
        return origin, self._now()


def cuda_clock(device: torch.device) -> EventClock:
    """Of the stream that the calling thread uses on this device."""

    def record() -> Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(device))
        return event

    return EventClock(record)


class Stopwatch:
    """The span of the last of many passes."""

    def __init__(self, clock: PassClock) -> None:
        self._clock = clock
        self._begun: Any = None
        self._ended: Any = None

    def begin(self) -> None:
        self._begun, self._ended = self._clock.mark(), None

    def end(self) -> None:
        self._ended = self._clock.mark()

    def span(self) -> Span | None:
        """None before the first pass has ended. Waits for that end."""
        return None if self._ended is None else self._clock.span(self._begun, self._ended)

    def stop(self) -> Span:
        """The pass ends here."""
        return self._clock.span(self._begun, self._clock.mark())
