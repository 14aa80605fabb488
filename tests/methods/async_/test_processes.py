"""A draft worker in a separate process: its answers, its cores, and every way in which it can
end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import psutil
import pytest

from d3d.errors import WorkerFailed
from d3d.methods.async_.coordinator import Coordinator
from d3d.methods.async_.placement import available_cores, worker_cores
from d3d.methods.async_.workers import MakePreparer, ProcessWorker, Worker
from d3d.target.native import NativeTarget
from support.async_runs import (
    Slow,
    Unhurried,
    async_drafter,
    causes,
    coordinating,
    decode,
    notes,
    readiness,
    rehearsed,
)
from support.runs import SAMPLING, Run, make, run

pytestmark = pytest.mark.slow

CORES = worker_cores(available_cores())
HOT = SAMPLING["hot"] | {"max_tokens": 60}


def process(*makes: MakePreparer) -> Callable[[], Worker]:
    """Launches one after the other, and the last one again and again."""
    left = list(makes)
    return lambda: ProcessWorker(left.pop(0) if len(left) > 1 else left[0], CORES)


def pid_of(coordinator: Coordinator) -> int:
    worker = coordinator.link.worker
    assert isinstance(worker, ProcessWorker)
    return worker.process.pid


def is_gone(pid: int, within_s: float) -> bool:
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.05)
    return False


def test_ids_equal_plain_and_every_verdict_that_was_foreseen_is_a_hit(target: NativeTarget) -> None:
    expected = run(target, **HOT)
    make_double = partial(rehearsed, [expected.token_ids], wrong=0.2)
    with coordinating(make_double, launch=process(make_double)) as coordinator:
        one = run(Unhurried(target, coordinator), async_drafter(coordinator), draft_length=8, **HOT)
        assert psutil.Process(pid_of(coordinator)).cpu_affinity() == CORES
        pid = pid_of(coordinator)
    assert one.ids == expected.ids
    assert readiness(one) == ["unprepared"] + ["hit"] * (len(readiness(one)) - 1)
    assert causes(one) == []
    assert is_gone(pid, 5)


def test_killed_at_every_round_and_started_again_it_costs_speed_only(target: NativeTarget) -> None:
    expected = run(target, max_tokens=8)
    make_double = partial(rehearsed, [expected.token_ids], wrong=0.3)
    with coordinating(make_double, launch=process(make_double), restarts=20) as coordinator:
        one = make(target, max_tokens=8)
        for _ in decode(target, async_drafter(coordinator, draft_length=4), [one]):
            if is_gone(pid_of(coordinator), 0.1):
                coordinator.ensure_worker()
            else:
                os.kill(pid_of(coordinator), signal.SIGKILL)
        assert one.ids == expected.ids
    assert len(notes(one)) >= len(one.rounds) // 2 > 1
    assert set(causes(one)) == {"dead"}
    assert any(round_.num_accepted for round_ in one.rounds), "between two kills it drafts"


def test_killed_for_good_the_answer_goes_on_plainly_and_the_next_request_drafts_again(
    target: NativeTarget,
) -> None:
    expected = run(target, **HOT)
    doubles = [
        partial(rehearsed, [expected.token_ids], wrong=0.2, dies_at=3),
        partial(rehearsed, [expected.token_ids], wrong=0.2),
    ]
    with coordinating(doubles[0], launch=process(*doubles)) as coordinator:
        drafter = async_drafter(coordinator)
        one = run(target, drafter, draft_length=8, **HOT)
        assert one.ids == expected.ids
        assert len(notes(one)) == 1
        assert "died" in notes(one)[0]
        assert one.rounds[-1].draft_length == 0
        coordinator.ensure_worker()
        again = run(target, drafter, draft_length=8, **HOT)
        assert again.ids == expected.ids
        assert sum(round_.num_accepted for round_ in again.rounds) > 20


@pytest.mark.parametrize("how", ["hangs", "is stopped"])
def test_one_that_hangs_is_ended(how: str, target: NativeTarget) -> None:
    expected = run(target, max_tokens=150)
    make_double = partial(
        rehearsed, [expected.token_ids], wrong=0.3, hangs_at=4 if how == "hangs" else -1
    )
    started = time.perf_counter()
    with coordinating(make_double, launch=process(make_double)) as coordinator:
        started = time.perf_counter()
        pid = pid_of(coordinator)
        one = make(target, max_tokens=150)
        drafter = async_drafter(coordinator, patience_s=0.2, hung_s=0.4)
        for _ in decode(Slow(target, 0.01), drafter, [one]):
            if len(one.events) == 5 and how == "is stopped":
                os.kill(pid, signal.SIGSTOP)
        assert is_gone(pid, 5)
    assert time.perf_counter() - started < 15
    assert one.ids == expected.ids
    assert notes(one) == [f"the draft process {pid} did not answer for 0.4 s and was ended"]
    assert causes(one)[-1] == "hung"


def refuses_to_load() -> None:
    raise ValueError("told not to load")


def test_one_that_can_not_load_its_drafter_is_an_error_before_anything_is_decoded() -> None:
    with (
        pytest.raises(WorkerFailed, match="told not to load"),
        coordinating(refuses_to_load, launch=process(refuses_to_load)),
    ):  # type: ignore[arg-type]
        pass


def test_one_that_does_not_come_up_in_time_is_given_up() -> None:
    with (
        pytest.raises(WorkerFailed, match="was not ready after"),
        coordinating(hang, launch=process(hang), start_s=0.5),
    ):  # type: ignore[arg-type]
        pass


def hang() -> None:
    time.sleep(3600)


@pytest.mark.parametrize("state", ["idle", "hanging"])
def test_the_worker_of_a_script_without_a_guard_is_gone_when_the_script_is_killed(
    state: str, tmp_path: Path
) -> None:
    """The idle one's script comes from standard input; both leave a forked process behind, which
    holds the connection open."""
    script = textwrap.dedent(f"""
        import os, time
        from functools import partial
        from d3d.methods.async_.messages import DraftNow, Open
        from d3d.methods.async_.workers import ProcessWorker
        from support.async_runs import rehearsed

        hangs_at = {0 if state == "hanging" else -1}
        worker = ProcessWorker(partial(rehearsed, [[1, 2, 3]], hangs_at=hangs_at), [])
        ready = worker.transport.receive(60)
        if os.fork() == 0:
            os.close(1)
            time.sleep(10)
            os._exit(0)
        worker.transport.send(Open(0, 2))
        worker.transport.send(DraftNow(0, 0, 0, (1,), 2))
        time.sleep(0.3)
        print(ready.pid, flush=True)
        time.sleep(3600)
    """)
    file = tmp_path / "parent.py"
    file.write_text(script)
    paths = os.pathsep.join([str(Path(__file__).parents[2]), *sys.path])
    parent = subprocess.Popen(
        [sys.executable, "-" if state == "idle" else str(file)],
        stdin=file.open(),
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": paths},
    )
    try:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert psutil.pid_exists(pid)
        parent.kill()
        assert is_gone(pid, 5)
        assert parent.stdout.read() == b"", "the worker has run the script"
    finally:
        parent.kill()
        parent.wait()


def test_a_run_is_the_same_in_a_thread_and_in_a_process(target: NativeTarget) -> None:
    expected = run(target, **HOT)
    make_double = partial(rehearsed, [expected.token_ids], wrong=0.3, hits=0.5)
    seen: list[Run] = []
    for launch in (None, process(make_double)):
        with coordinating(make_double, launch=launch) as coordinator:
            seen.append(
                run(
                    Unhurried(target, coordinator),
                    async_drafter(coordinator),
                    draft_length=8,
                    **HOT,
                )
            )
    thread, separate = (
        [
            (s.draft_length, s.num_accepted, p)
            for s, p in zip(one.rounds, readiness(one), strict=False)
        ]
        for one in seen
    )
    assert thread == separate
    assert seen[0].ids == seen[1].ids == expected.ids
