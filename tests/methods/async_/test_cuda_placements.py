"""CUDA placements, as far as testable without a GPU: the choice, the refusals, and times by
events."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest
import torch

from d3d.engine.clock import RENEWED_S, EventClock, PassClock, ProcessorClock, Stopwatch
from d3d.engine.metrics import overlap
from d3d.errors import Disconnected, InvalidRequest
from d3d.methods.async_.messages import Drafted, DraftNow, Failed, Open, Ready
from d3d.methods.async_.placement import check_placement, default_placement, other_device
from d3d.methods.async_.workers import ThreadWorker
from d3d.target.native import NativeTarget
from support.async_runs import async_drafter, coordinating, rehearsed
from support.runs import run

CUDA = torch.device("cuda")


@dataclass
class Queue:
    """A device that reaches everything that is asked of it a while later, and its events."""

    lag_s: float = 0.5
    now_s: float = 100.0
    waits: list[float] = field(default_factory=list)

    def now(self) -> float:
        return self.now_s

    def record(self) -> QueueEvent:
        return QueueEvent(self, self.now_s + self.lag_s)


@dataclass
class QueueEvent:
    queue: Queue
    at_s: float

    def synchronize(self) -> None:
        self.queue.waits.append(self.at_s)
        self.queue.now_s = max(self.queue.now_s, self.at_s)

    def elapsed_time(self, end_event: QueueEvent) -> float:
        assert max(self.at_s, end_event.at_s) <= self.queue.now_s, "neither may lie ahead"
        return 1000 * (end_event.at_s - self.at_s)


# Times


def test_events_tell_when_the_device_worked_and_not_when_it_was_asked() -> None:
    queue = Queue()
    clock = EventClock(queue.record, queue.now)
    assert queue.now_s == 100.5
    begun = clock.mark()
    queue.now_s += 0.1
    ended = clock.mark()
    assert queue.waits == [100.5], "marks wait for nothing"
    assert clock.span(begun, ended) == (pytest.approx(101.0), pytest.approx(101.1))
    assert queue.now_s == pytest.approx(101.1)


def test_events_are_tied_to_the_processors_clock_anew_before_they_lose_precision() -> None:
    queue = Queue(lag_s=0.0)
    clock = EventClock(queue.record, queue.now)
    begun = clock.mark()
    queue.now_s += RENEWED_S + 1
    ended = clock.mark()
    assert ended.origin_s == queue.now_s
    assert clock.span(begun, ended) == (pytest.approx(100.0), pytest.approx(101 + RENEWED_S)), (
        "each by its own origin"
    )


def test_a_stopwatch_has_no_span_before_a_pass_has_ended() -> None:
    watch = Stopwatch(ProcessorClock())
    assert watch.span() is None
    watch.begin()
    assert watch.span() is None
    watch.end()
    span = watch.span()
    assert span is not None
    assert span[0] <= span[1]


def test_a_rounds_verification_is_where_the_device_says_it_was(
    target: NativeTarget,
) -> None:
    timed = NativeTarget(target.model)
    timed._stopwatch = Stopwatch(_Counting())
    one = run(timed, max_tokens=4)
    assert [round_.device_span for round_ in one.rounds] == [(2.0, 3.0), (4.0, 5.0), (6.0, 7.0)]
    assert overlap(one.rounds, 1).t_verify_s == 1.0
    assert [round_.device_span for round_ in run(target, max_tokens=4).rounds] == [None] * 3


class _Counting:
    """A clock that goes one second at every mark."""

    def __init__(self) -> None:
        self.marks = 0

    def mark(self) -> float:
        self.marks += 1
        return self.marks - 1.0

    def span(self, begun: float, ended: float) -> tuple[float, float]:
        return begun, ended


# A worker's thread and its setting


def test_a_worker_works_within_its_setting_and_by_its_clock(target: NativeTarget) -> None:
    within: list[str] = []

    @contextmanager
    def setting() -> Iterator[PassClock]:
        within.append(f"in {threading.current_thread().name}")
        yield _Counting()
        within.append("out")

    expected = run(target, max_tokens=30)
    with coordinating(
        lambda: None, launch=lambda: ThreadWorker(lambda: rehearsed([expected.token_ids]), setting)
    ) as coordinator:  # type: ignore[arg-type, return-value]
        one = run(target, async_drafter(coordinator), max_tokens=30, draft_length=8)
        worker = coordinator.link.worker
        assert worker is not None
    worker.wait(5)
    assert one.ids == expected.ids
    passes = [
        span
        for round_ in one.rounds
        if round_.preparation is not None
        for span in round_.preparation.passes
    ]
    assert passes[0] == (0.0, 1.0)
    assert within == ["in d3d-draft-worker", "out"]


def test_a_setting_that_can_not_be_had_is_said_at_once() -> None:
    @contextmanager
    def setting() -> Iterator[PassClock]:
        raise RuntimeError("told to have no device")
        yield ProcessorClock()

    worker = ThreadWorker(lambda: rehearsed([[1]]), setting)
    message = worker.transport.receive(5)
    assert isinstance(message, Failed)
    assert "told to have no device" in message.error
    worker.wait(5)
    assert not worker.thread.is_alive()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_worker_whose_loading_is_cut_off_leaves_nobody_waiting() -> None:
    def make_nothing() -> None:
        raise SystemExit

    worker = ThreadWorker(make_nothing)  # type: ignore[arg-type]
    with pytest.raises(Disconnected):
        worker.transport.receive(5)


def test_the_processors_clock_is_what_a_plain_thread_goes_by() -> None:
    worker = ThreadWorker(lambda: rehearsed([[1, 2, 3, 4]]))
    assert isinstance(worker.transport.receive(5), Ready)
    worker.transport.send(Open(0, 2))
    worker.transport.send(DraftNow(0, 0, 0, (1,), 2))
    answer = worker.transport.receive(5)
    assert isinstance(answer, Drafted)
    assert answer.started <= answer.ended
    worker.kill()
    worker.wait(5)


# Choice and refusals


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """As many CUDA devices as the test says."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: request.param > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: request.param)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)


@pytest.mark.parametrize(
    ("devices", "device", "placement"),
    [(0, "cpu", "thread"), (2, "cpu", "thread"), (1, "cuda", "streams"), (2, "cuda:1", "devices")],
    indirect=["devices"],
)
def test_the_placement_is_chosen_by_what_is_there(
    devices: None, device: str, placement: str
) -> None:
    assert default_placement(torch.device(device)) == placement
    check_placement(placement, torch.device(device))


@pytest.mark.parametrize("devices", [2], indirect=True)
def test_the_drafter_gets_a_device_that_is_not_the_targets(devices: None) -> None:
    assert other_device(CUDA) == torch.device("cuda:1")
    assert other_device(torch.device("cuda:0")) == torch.device("cuda:1")
    assert other_device(torch.device("cuda:1")) == torch.device("cuda:0")


@pytest.mark.parametrize(
    ("devices", "name", "device", "words"),
    [
        (
            0,
            "streams",
            "cpu",
            "streams is for CUDA, and this target is on cpu .*no CUDA.*use thread or processes",
        ),
        (0, "devices", "cpu", "devices is for CUDA, and this target is on cpu .*no CUDA"),
        (1, "streams", "cpu", "streams is for CUDA, and this target is on cpu; use thread"),
        (1, "devices", "cuda", "needs a second CUDA device.* use streams"),
        (1, "processes", "cuda", "CPU cores, and this target is on cuda; use streams"),
    ],
    indirect=["devices"],
)
def test_what_is_not_to_be_had_is_refused_with_the_reason(
    devices: None, name: str, device: str, words: str
) -> None:
    with pytest.raises(InvalidRequest, match=words):
        check_placement(name, torch.device(device))
