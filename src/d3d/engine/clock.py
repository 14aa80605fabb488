"""Clocks for model passes, in seconds of `time.perf_counter`: the processor's, or CUDA events.

A CUDA device runs work some time after it was queued, so only events know when. The event clock has
not run on a GPU yet."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch

Span = tuple[float, float]
"""Start and end in seconds of `time.perf_counter`."""

RENEWED_S = 10.0
"""Seconds after which the origin event is renewed. Event distances are float32 milliseconds: within
this span they are exact to a microsecond."""


class PassClock(Protocol):
    """Clock of one queue of work."""

    def mark(self) -> Any:
        """Mark the end of the work queued so far, without waiting."""
        ...

    def span(self, begun: Any, ended: Any) -> Span:
        """Times at which the queue reached two marks; waits for the second."""
        ...


class ProcessorClock:
    """Clock for work that is done when the call returns."""

    def mark(self) -> float:
        return time.perf_counter()

    def span(self, begun: float, ended: float) -> Span:
        return begun, ended


class Event(Protocol):
    """The part of `torch.cuda.Event` that is used; it has been recorded."""

    def synchronize(self) -> None: ...

    def elapsed_time(self, end_event: Any) -> float:
        """Milliseconds from this event to a later one; both have been reached."""
        ...


class EventMark(NamedTuple):
    event: Event
    origin: Event
    origin_s: float


class EventClock:
    """Clock by events, tied to the processor's clock by an origin event."""

    def __init__(
        self, record: Callable[[], Event], now: Callable[[], float] = time.perf_counter
    ) -> None:
        """record: queues a new event behind all work queued so far."""
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
    """Clock of the stream that the calling thread uses on this device."""

    def record() -> Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(device))
        return event

    return EventClock(record)


class Stopwatch:
    """Span of the latest pass."""

    def __init__(self, clock: PassClock) -> None:
        self._clock = clock
        self._begun: Any = None
        self._ended: Any = None

    def begin(self) -> None:
        self._begun, self._ended = self._clock.mark(), None

    def end(self) -> None:
        self._ended = self._clock.mark()

    def span(self) -> Span | None:
        """Span of the latest pass; None before the first has ended. Waits for its end."""
        return None if self._ended is None else self._clock.span(self._begun, self._ended)

    def stop(self) -> Span:
        """End the pass and return its span."""
        return self._clock.span(self._begun, self._clock.mark())
