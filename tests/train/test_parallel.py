"""Several processes train as one does: gloo on the CPU, two processes started as torchrun starts
them."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from d3d.errors import InvalidRequest
from d3d.hub.open_drafter import load_drafter
from d3d.hub.open_model import OpenModel
from d3d.train.corpus import Sample
from d3d.train.run import TrainingRun
from d3d.train.trainer import Trainer
from support import parallel_worker as worker
from support.tiny_model import open_tiny

pytestmark = pytest.mark.slow

TESTS = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def base(tiny_target: Path) -> OpenModel:
    return open_tiny(tiny_target)


def start(target: Path, directory: Path) -> list[subprocess.Popen[str]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
    }
    shared["PYTHONPATH"] = os.pathsep.join([str(TESTS), *sys.path])
    command = [
        sys.executable,
        "-m",
        "support.parallel_worker",
        str(target),
        str(directory),
    ]
    return [
        subprocess.Popen(
            command,
            env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]


def finish(processes: list[subprocess.Popen[str]], timeout: float = 120) -> list[str]:
    try:
        return [process.communicate(timeout=timeout)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()


class Ended(NamedTuple):
    directory: Path
    codes: list[int]
    output: list[str]
    """By process."""


@pytest.fixture(scope="module")
def ended(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """Two processes that have trained every kind, four steps as two and two more, until the second
    died in a run of its own; torch takes seconds to import, so there are only these two."""
    directory = tmp_path_factory.mktemp("parallel")
    processes = start(tiny_target, directory)
    output = finish(processes)
    return Ended(directory, [process.returncode for process in processes], output)


@pytest.fixture(scope="module")
def trained(ended: Ended) -> Path:
    """The directory that they trained in."""
    assert all("trained" in text for text in ended.output), ended.output
    return ended.directory


@pytest.mark.parametrize("kind", worker.KINDS)
def test_two_processes_with_an_answer_each_equal_one_with_two(
    kind: str, trained: Path, base: OpenModel, tmp_path: Path
) -> None:
    texts = worker.texts(base)
    alone = TrainingRun(tmp_path, base, worker.run_config(kind), texts[:4], texts[4:])
    losses: list[float] = []
    alone.run(lambda stats: losses.append(stats.loss))
    found = torch.load(trained / f"{kind}.weights.pt", weights_only=True)
    assert found.keys() == alone.model.trainable().keys()
    started = worker.untrained(base, kind)
    for name, parameter in alone.model.trainable().items():
        assert not torch.equal(parameter, started[name]) or name.endswith("down")
        torch.testing.assert_close(found[name], parameter.detach(), atol=1e-5, rtol=0, msg=name)
    assert json.loads((trained / f"{kind}.losses.json").read_text()) == pytest.approx(
        losses, abs=1e-5
    )


@pytest.mark.parametrize("kind", worker.KINDS)
def test_the_first_process_writes_one_log_and_a_checkpoint_that_loads(
    kind: str, trained: Path, base: OpenModel
) -> None:
    rows = [json.loads(line) for line in (trained / kind / "log.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 2, 4]
    assert max(row["acceptance_length"] for row in rows) >= 1
    assert load_drafter(trained / kind / "best", base).config.block_size == worker.BLOCK


def test_weights_that_are_shared_out_are_not_gone_on_with_by_one_process(
    trained: Path, base: OpenModel
) -> None:
    texts = worker.texts(base)
    with pytest.raises(InvalidRequest, match=r"holds state\.parts.*shared out"):
        TrainingRun(
            trained / "full weights", base, worker.run_config("full weights"), texts[:4], texts[4:]
        )


def test_a_process_that_dies_ends_the_other_soon(trained: Path, ended: Ended) -> None:
    assert ended.codes[1] == worker.DEATH
    assert ended.codes[0] != 0, ended.output[0]
    assert "step 1" in ended.output[0]
    assert "step 2" not in ended.output[0]


def test_what_is_not_finite_in_one_process_is_named_by_all(trained: Path) -> None:
    messages = [(trained / f"not_finite.{rank}.txt").read_text() for rank in range(2)]
    assert messages[0] == messages[1]
    assert (
        "the loss is not finite (NaN or infinite) in training step 0, in an answer" in messages[0]
    )


def test_answers_that_can_not_be_shared_evenly_are_refused(base: OpenModel) -> None:
    class Three(worker.Parallel):
        size = 3

    config = worker.run_config("deltas")
    samples = [Sample([1, 2], [3, 4, 5], "x", 0.0, 0)]
    with pytest.raises(
        InvalidRequest, match=r"answers_per_step \(2\) can't be shared evenly by 3 processes"
    ):
        Trainer(worker.make(base, "deltas"), samples, config.train, Three())
