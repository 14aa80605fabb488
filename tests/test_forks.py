"""Models and draft workers in processes that are forked while they are in use."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import d3d
from d3d.api import Model
from d3d.forks import set_num_threads
from d3d.methods.async_.messages import Forget, Ready
from d3d.methods.async_.worker_link import WorkerLink
from support.tiny_model import write_tiny_target

pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")
PROMPT = "how much is two and two?"
LIMIT_S = 20


def told_by_child(function: Callable[[], object]) -> str:
    """What a function returns, or raises, in a forked process; empty if that hangs."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            signal.alarm(LIMIT_S)
            os.write(writer, str(function()).encode())
        except BaseException as error:
            os.write(writer, f"{type(error).__name__}: {error}".encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as answer:
        told = answer.read()
    os.waitpid(child, 0)
    return told


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_target(tmp_path_factory.mktemp("target"))


@pytest.fixture
def model(path: Path) -> Iterator[Model]:
    """One that has answered with two threads, OpenMP's pool among them."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    torch.ones(1_000_000).add(1)
    with d3d.load(str(path), device="cpu", dtype="float32") as loaded:
        loaded.generate(PROMPT, max_tokens=2)
        yield loaded
    torch.set_num_threads(before)


def test_a_model_is_refused_at_once_in_a_process_that_was_forked_after_its_loading(
    model: Model,
) -> None:
    begun = model.add(PROMPT, max_tokens=3)
    streamed = model.stream(PROMPT, max_tokens=3)
    next(streamed)
    with model._turn:  # as if another thread were in the midst of a step
        for use in (
            lambda: model.generate(PROMPT, max_tokens=3),
            lambda: model.generate_many([PROMPT], max_tokens=3),
            lambda: list(streamed),
            begun.result,
            model.step,
        ):
            told = told_by_child(use)
            assert told.startswith("InvalidRequest: this model was loaded before")
            assert "load it after the fork, or" in told
        assert told_by_child(model.close) == "None"
    assert len(begun.result().token_ids) == 3, "the parent goes on"


def test_a_model_can_be_loaded_after_the_fork_and_has_one_thread(model: Model, path: Path) -> None:
    expected = model.generate(PROMPT, max_tokens=3).token_ids

    def answer() -> str:
        set_num_threads(2)  # as a preset does
        torch.ones(1_000_000).add(1)
        with d3d.load(str(path), device="cpu", dtype="float32") as own:
            return f"{own.generate(PROMPT, max_tokens=3).token_ids} {torch.get_num_threads()}"

    assert told_by_child(answer) == f"{expected} 1"
    assert torch.get_num_threads() == 2


class Recorded:
    """A worker that notes what is done to it."""

    description = "double"

    def __init__(self) -> None:
        self.transport, self.done = self, list[str]()

    def send(self, message: object) -> None:
        self.done.append(f"told {message}")

    def receive(self, timeout_s: float) -> object:
        return Ready(0)

    def close(self) -> None:
        self.done.append("closed")

    def kill(self) -> None:
        self.done.append("killed")

    def wait(self, timeout_s: float) -> None:
        pass


def test_a_forked_process_leaves_its_parents_worker_alone_and_starts_its_own() -> None:
    workers: list[Recorded] = []

    def launch() -> Recorded:
        workers.append(Recorded())
        return workers[-1]

    link = WorkerLink(launch, restarts=0, start_s=1)
    link.begin()
    link.receive(0)
    assert link.send(Forget(1))

    def use() -> str:
        was_sent = link.send(Forget(2))
        answer = link.receive(0)
        link.close()
        link.begin()
        link.receive(0)
        link.close()
        return f"{was_sent} {answer} {[worker.done for worker in workers]}"

    first, second = "['told Forget(sequence_id=1)']", "['told Stop()', 'killed']"
    assert told_by_child(use) == f"False None [{first}, {second}]"
