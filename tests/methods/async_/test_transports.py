"""Connections between coordinator and worker: both kinds keep the same contract."""

from __future__ import annotations

import multiprocessing
import threading
import time
from collections.abc import Iterator

import pytest

from d3d.engine.drafter import Draft
from d3d.errors import Disconnected
from d3d.methods.async_ import transports
from d3d.methods.async_.messages import Prepare, Successors
from d3d.methods.async_.outcomes import Outcome
from d3d.methods.async_.transports import PipeTransport, Transport, in_process_pair

Pair = tuple[Transport, Transport]


@pytest.fixture(params=["in process", "pipe"])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    if request.param == "in process":
        ours, theirs = in_process_pair()
    else:
        here, there = multiprocessing.get_context("spawn").Pipe()
        ours, theirs = PipeTransport(here), PipeTransport(there)  # type: ignore[assignment]
    yield ours, theirs
    ours.close()
    theirs.close()


def test_messages_arrive_whole_and_in_order_both_ways(pair: Pair) -> None:
    ours, theirs = pair
    there = [
        Prepare(1, number, 0, tuple(range(number * 100)), (5, 6), 4, 2) for number in range(40)
    ]
    back = [
        Successors(1, number, ((Outcome(2, 9), Draft((1, 2), "odd")),), 0.5, 1.5)
        for number in range(40)
    ]
    for request, answer in zip(there, back, strict=True):
        ours.send(request)
        theirs.send(answer)
    assert [theirs.receive(5) for _ in there] == there
    assert [ours.receive(5) for _ in back] == back


def test_receiving_waits_no_longer_than_told(pair: Pair) -> None:
    started = time.perf_counter()
    assert pair[0].receive(0.0) is None
    assert pair[0].receive(0.1) is None
    assert 0.1 <= time.perf_counter() - started < 5


def test_a_message_ends_the_wait(pair: Pair) -> None:
    threading.Timer(0.05, pair[1].send, ("now",)).start()
    started = time.perf_counter()
    assert pair[0].receive(30) == "now"
    assert time.perf_counter() - started < 5


def test_what_was_sent_before_the_end_still_arrives_and_then_nothing_can(pair: Pair) -> None:
    ours, theirs = pair
    for number in range(20):
        theirs.send(number)
    theirs.close()
    assert [ours.receive(5) for _ in range(20)] == list(range(20))
    for _ in range(2):
        with pytest.raises(Disconnected):
            ours.receive(5)
    time.sleep(0.3)  # a pipe may take a moment to notice
    with pytest.raises(Disconnected):
        ours.send("?")


def test_the_end_wakes_whoever_waits(pair: Pair) -> None:
    threading.Timer(0.05, pair[1].close).start()
    started = time.perf_counter()
    with pytest.raises(Disconnected):
        pair[0].receive(30)
    assert time.perf_counter() - started < 5


def test_closing_twice_is_no_error_and_ends_sending(pair: Pair) -> None:
    pair[0].close()
    pair[0].close()
    with pytest.raises(Disconnected):
        pair[0].send("?")


def test_sending_to_somebody_who_does_not_read_never_waits(pair: Pair) -> None:
    """Megabytes that no pipe holds; and at last the other side is taken for gone."""
    started = time.perf_counter()
    with pytest.raises(Disconnected):
        _send_many(pair[0], transports.MOST_WAITING * 3)
    assert time.perf_counter() - started < 5


def _send_many(transport: Transport, count: int) -> None:
    for _ in range(count):
        transport.send(bytes(10_000))
