"""Unit tests of speculation cache, worker and placement."""

from __future__ import annotations

import threading

import pytest
import torch

from d3d.engine.drafter import Draft
from d3d.errors import InvalidRequest
from d3d.methods.async_.draft_worker import DraftWorker
from d3d.methods.async_.messages import (
    Drafted,
    DraftNow,
    Failed,
    Forget,
    Open,
    Prepare,
    Ready,
    Stop,
    Successors,
)
from d3d.methods.async_.outcomes import Outcome
from d3d.methods.async_.placement import TargetThreads, check_placement, worker_cores
from d3d.methods.async_.speculation_cache import SpeculationCache
from d3d.methods.async_.transports import in_process_pair
from support.async_runs import rehearsed

A, B = Outcome(0, 5), Outcome(1, 6)


def successors(sequence_id: int, round_id: int, *outcomes: Outcome) -> Successors:
    return Successors(
        sequence_id, round_id, tuple((o, Draft((o.bonus_token,))) for o in outcomes), 0.0, 0.0
    )


# Cache


def test_a_successor_is_found_by_sequence_round_and_outcome_and_by_nothing_less() -> None:
    cache = SpeculationCache(8)
    cache.expect(1, 3)
    cache.expect(2, 3)
    assert cache.put(successors(1, 3, A, B))
    assert cache.take(2, 3, A) is None
    assert cache.take(1, 2, A) is None
    assert cache.take(1, 3, B) == Draft((6,))
    assert cache.take(1, 3, A) is None, "a round has one verdict"
    assert len(cache) == 0


def test_what_nobody_expects_is_dropped_and_counted() -> None:
    cache = SpeculationCache(8)
    assert not cache.put(successors(1, 0, A))
    cache.expect(1, 4)
    assert not cache.put(successors(1, 3, A))
    assert not cache.put(successors(1, 5, A))
    cache.forget(1)
    assert not cache.put(successors(1, 4, A))
    assert (cache.num_stale, len(cache)) == (4, 0)


def test_a_later_round_forgets_the_earlier_ones() -> None:
    cache = SpeculationCache(8)
    for round_id in range(100):
        cache.expect(1, round_id)
        cache.put(successors(1, round_id, A, B))
    assert len(cache) == 2
    assert cache.take(1, 98, A) is None


def test_no_round_holds_more_than_the_most() -> None:
    cache = SpeculationCache(3)
    cache.expect(1, 0)
    cache.put(successors(1, 0, *(Outcome(0, n) for n in range(50))))
    assert len(cache) == 3
    assert cache.take(1, 0, Outcome(0, 0)) is not None


# Worker


def answers_of(*messages: object) -> list[object]:
    """What a worker says to messages that are all there when it begins."""
    ours, theirs = in_process_pair()
    for message in (*messages, "nothing that it knows"):
        ours.send(message)
    known = list(range(10, 40))
    thread = threading.Thread(target=DraftWorker(theirs, rehearsed([known])).run)
    thread.start()
    said = []
    while (message := ours.receive(0.3)) is not None:
        said.append(message)
    ours.send(Stop())
    thread.join(5)
    assert not thread.is_alive()
    assert isinstance(said[0], Ready)
    return said[1:]


def test_the_worker_drafts_and_prepares_behind_what_it_was_told() -> None:
    drafted, prepared = answers_of(
        Open(7, 4), DraftNow(7, 1, 0, (10, 11), 3), Prepare(7, 1, 2, (), (12, 13, 14), 3, 4)
    )
    assert isinstance(drafted, Drafted)
    assert drafted.block == Draft((12, 13, 14))
    assert isinstance(prepared, Successors)
    assert prepared.blocks == ((Outcome(3, 15), Draft((16, 17, 18))),)
    assert drafted.started <= drafted.ended <= prepared.started <= prepared.ended


def test_drafts_come_before_preparations() -> None:
    said = answers_of(
        Open(1, 4),
        Open(2, 4),
        Prepare(1, 5, 0, (10,), (11,), 3, 4),
        DraftNow(2, 9, 0, (10,), 3),
    )
    assert [type(message) for message in said] == [Drafted, Successors]


def test_forgotten_sequences_are_not_worked_for() -> None:
    assert answers_of(Open(1, 4), Prepare(1, 5, 0, (10,), (11,), 3, 4), Forget(1)) == []


@pytest.mark.parametrize(
    "request_", [DraftNow(1, 5, 0, (10,), 3), Prepare(1, 5, 3, (10,), (11,), 3, 4)]
)
def test_a_text_with_a_hole_and_an_unknown_sequence_are_failures_and_no_guess(
    request_: object,
) -> None:
    opened = [Open(1, 4)] if isinstance(request_, Prepare) else []
    (failed,) = answers_of(*opened, request_)
    assert isinstance(failed, Failed)
    assert (failed.sequence_id, failed.round_id) == (1, 5)
    assert "lacks the first" in failed.error


# Placement


@pytest.mark.parametrize(
    ("cores", "share"), [([0], [0]), ([0, 1], [1]), ([2, 3, 5], [5]), ([0, 1, 2, 3], [2, 3])]
)
def test_the_worker_gets_half_of_the_cores_and_never_none(
    cores: list[int], share: list[int]
) -> None:
    assert worker_cores(cores) == share


@pytest.mark.parametrize(
    ("name", "device", "words"),
    [
        ("streams", "cpu", "CUDA"),
        ("devices", "cpu", "CUDA"),
        ("shed", "cpu", "not one of thread, processes, streams, devices"),
        ("processes", "cuda", "CPU cores"),
    ],
)
def test_impossible_placements_are_refused(name: str, device: str, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        check_placement(name, torch.device(device))


def test_the_number_of_threads_is_put_back_at_the_last_release() -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        threads = TargetThreads(1)
        threads.acquire()
        threads.acquire()
        threads.release()
        assert torch.get_num_threads() == 1
        threads.release()
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
