"""One of the processes of tests/training/test_parallel.py: python -m support.parallel_worker
TARGET DIRECTORY. Trains every kind, then the second process dies."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

from d3d.errors import NotFinite
from d3d.hub.open_model import OpenModel
from d3d.model.drafter import DeltaConfig, DrafterModel
from d3d.model.from_target import from_target
from d3d.train.config import DrafterSpec, RunConfig, Stage, TrainConfig
from d3d.train.corpus import Sample
from d3d.train.parallel import Parallel, choose_parallel, processes
from d3d.train.run import TrainingRun
from d3d.train.trainer import Trainer
from support.tiny_model import open_tiny

__all__ = ["Parallel"]

BLOCK = 4
DEATH = 9
KINDS: dict[str, dict[str, Any]] = {
    "deltas": {"delta": DeltaConfig(rank=4)},
    "full weights": {"delta": None},
    "deltas, shared out": {"delta": DeltaConfig(rank=4)},
    "full weights, computed twice": {"delta": None},
}


def run_config(kind: str) -> RunConfig:
    train = TrainConfig(
        steps=4,
        warmup=1,
        max_length=64,
        learning_rate=1e-3,
        stages=(Stage(share=1.0, block_size=BLOCK, anchors=6),),
        distributed="fsdp" if "shared" in kind else "auto",
        activation_checkpointing="twice" in kind,
    )
    return RunConfig(
        drafter=DrafterSpec(block_size=BLOCK, **KINDS[kind]),
        train=train,
        evaluate_every=2,
        evaluate_draft_length=BLOCK,
        measure_start=True,
    )


def texts(base: OpenModel) -> list[Sample]:
    generator = torch.Generator().manual_seed(0)
    return [
        Sample(
            [first, 9, 30],
            torch.randint(3, 200, (14 + first,), generator=generator).tolist(),
            "test",
            0.0,
            0,
        )
        for first in range(6)
    ]


def make(base: OpenModel, kind: str) -> DrafterModel:
    return from_target(base.transformer, run_config(kind).drafter.resolve(base.config.num_layers))


def untrained(base: OpenModel, kind: str) -> dict[str, torch.Tensor]:
    return {
        name: parameter.detach().clone() for name, parameter in make(base, kind).trainable().items()
    }


def open_run(kind: str, target: Path, directory: Path) -> TrainingRun:
    base = open_tiny(target)
    config = run_config(kind)
    parallel = choose_parallel(
        config.train.distributed,
        full_weights=config.drafter.delta is None,
        device=torch.device("cpu"),
    )
    return TrainingRun(
        directory / kind, base, config, texts(base)[:4], texts(base)[4:], parallel=parallel
    )


def train(kind: str, target: Path, directory: Path) -> None:
    losses: list[float] = []
    first = open_run(kind, target, directory)
    first.run(lambda stats: losses.append(stats.loss), stop=lambda: first.trainer.step >= 2)
    second = open_run(kind, target, directory)
    assert second.trainer.step == 2
    second.run(lambda stats: losses.append(stats.loss))
    weights = {
        name: second.parallel.whole(parameter.detach()).clone()
        for name, parameter in second.model.trainable().items()
    }
    if second.parallel.rank == 0:
        torch.save(weights, directory / f"{kind}.weights.pt")
        (directory / f"{kind}.losses.json").write_text(json.dumps(losses))


def not_finite(target: Path, directory: Path) -> None:
    run = open_run("deltas", target, directory / "not_finite")
    real = run.trainer._loss

    def poisoned(*arguments: Any) -> Any:
        loss, count = real(*arguments)
        return (loss * float("nan") if run.parallel.rank == 1 else loss), count

    run.trainer._loss = poisoned  # type: ignore[method-assign]
    try:
        run.run(lambda _: None)
    except NotFinite as error:
        (directory / f"not_finite.{run.parallel.rank}.txt").write_text(str(error))


def die(target: Path, directory: Path) -> None:
    run = open_run("deltas", target, directory)
    real = Trainer._loss

    def killed(*arguments: Any) -> Any:
        if run.parallel.rank == 1 and run.trainer.step == 1:
            os._exit(DEATH)
        return real(run.trainer, *arguments)

    run.trainer._loss = killed  # type: ignore[method-assign]
    run.run(lambda stats: print("step", stats.step, flush=True))


if __name__ == "__main__":
    target, directory = map(Path, sys.argv[1:])
    with processes("cpu", patience_s=30.0):
        for kind in KINDS:
            train(kind, target, directory)
        not_finite(target, directory)
        print("trained", flush=True)
        die(target, directory / "dying")
