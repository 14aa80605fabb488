"""Pruning on a tiny model: the same choice for the same seed, interrupted or not, in checkpoints
that load like any other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from d3d.errors import InvalidRequest
from d3d.hub.checkpoint import read_config
from d3d.hub.open_drafter import load_drafter
from d3d.hub.open_model import OpenModel
from d3d.lab.prune.curve import Depth, DepthTiming, choose
from d3d.lab.prune.run import PruneAnswers, PruneSettings, PruningRun
from d3d.lab.prune.timing import time_drafter
from d3d.train.config import Stage, TrainConfig
from d3d.train.corpus import Sample
from support.drafters import text
from support.tiny_model import open_tiny, write_tiny_drafter, write_tiny_target

SETTINGS = PruneSettings(
    fewest_layers=2, shortlist=2, draft_length=4, screened_answers=2, anchors=4
)
HEAL = TrainConfig(
    steps=2, warmup=1, stages=(Stage(share=1.0, block_size=4, anchors=4),), answers_per_step=1
)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> OpenModel:
    return open_tiny(
        write_tiny_target(tmp_path_factory.mktemp("pruning") / "target", num_hidden_layers=4)
    )


@pytest.fixture(scope="module")
def drafter(target: OpenModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_drafter(
        tmp_path_factory.mktemp("pruning") / "drafter", target.path, anchor_slot=True
    )


def samples(*seeds: int) -> list[Sample]:
    return [Sample(text(6, seed=seed), text(14, seed=seed + 50), "test", 0.0, 0) for seed in seeds]


ANSWERS = PruneAnswers(samples(1, 2, 3), samples(4, 5), tuple(samples(6, 7)))


def pruned(
    path: Path, source: Path, target: OpenModel, heal: TrainConfig | None = None, **changes: Any
) -> PruningRun:
    run = PruningRun(
        path, source, target, ANSWERS, PruneSettings(**{**vars(SETTINGS), **changes}), heal
    )
    run.run(lambda _: None)
    return run


def tensors(path: Path, target: OpenModel) -> dict[str, torch.Tensor]:
    return {
        name: parameter.detach()
        for name, parameter in load_drafter(path, target).trainable().items()
    }


def test_each_step_removes_the_layer_whose_absence_costs_least_acceptance(
    target: OpenModel, drafter: Path, tmp_path: Path
) -> None:
    run = pruned(tmp_path / "run", drafter, target)
    assert [depth.layers for depth in run.curve] == [4, 3, 2]
    for depth in run.curve[1:]:
        best = sorted(depth.screened, key=lambda layer: depth.screened[layer])[:2]
        assert set(depth.shortlisted) == set(best)
        assert depth.removed is not None
        assert depth.shortlisted[depth.removed] == max(depth.shortlisted.values())
        assert depth.acceptance_length == pytest.approx(
            depth.shortlisted[depth.removed], rel=0.2
        )  # stored weights are rounded
    gone = {depth.removed for depth in run.curve[1:]}
    assert read_config(run.checkpoint(run.curve[-1])).drafter.slot_layers == tuple(
        sorted({0, 1, 2, 3} - gone)
    )


def test_none_removed_changes_nothing_and_the_original_is_only_read(
    target: OpenModel, drafter: Path, tmp_path: Path
) -> None:
    before = {file.name: file.read_bytes() for file in drafter.iterdir()}
    run = pruned(tmp_path / "run", drafter, target, fewest_layers=4)
    assert len(run.curve) == 1
    for name, tensor in tensors(run.checkpoint(run.curve[0]), target).items():
        torch.testing.assert_close(tensor, tensors(drafter, target)[name], atol=1e-6, rtol=1e-2)
    assert {file.name: file.read_bytes() for file in drafter.iterdir()} == before


@pytest.mark.parametrize("heal", [None, HEAL], ids=["as it is", "healed"])
def test_a_run_that_was_interrupted_comes_to_the_same(
    heal: TrainConfig | None, target: OpenModel, drafter: Path, tmp_path: Path
) -> None:
    whole = pruned(tmp_path / "whole", drafter, target, heal)

    class Stop(Exception):
        pass

    def stop(_: Depth) -> None:
        raise Stop

    for _ in range(3):
        with pytest.raises(Stop):
            PruningRun(tmp_path / "parts", drafter, target, ANSWERS, SETTINGS, heal).run(stop)
    with (tmp_path / "parts" / "log.jsonl").open("a") as log:
        log.write('{"layers": 1, "remo')  # torn by a kill
    again = PruningRun(tmp_path / "parts", drafter, target, ANSWERS, SETTINGS, heal)
    again.run(lambda _: None)
    assert again.curve == whole.curve
    for name, tensor in tensors(whole.checkpoint(whole.curve[-1]), target).items():
        assert torch.equal(tensor, tensors(again.checkpoint(again.curve[-1]), target)[name]), name


def test_healing_trains_the_layers_that_are_left(
    target: OpenModel, drafter: Path, tmp_path: Path
) -> None:
    bare, healed = (
        pruned(tmp_path / name, drafter, target, heal, fewest_layers=3)
        for name, heal in (("bare", None), ("healed", HEAL))
    )
    assert healed.curve[-1].healed == 2
    assert bare.curve[-1].removed == healed.curve[-1].removed
    one, other = (tensors(run.checkpoint(run.curve[-1]), target) for run in (bare, healed))
    assert one.keys() == other.keys()
    assert all(not torch.equal(one[name], other[name]) for name in one if name.endswith(".up"))


@pytest.mark.parametrize(
    ("answers", "changes", "message"),
    [
        (PruneAnswers(samples(1), samples(1)), {}, "would choose layers and judge"),
        (PruneAnswers(samples(1), []), {}, "to judge by"),
        (ANSWERS, {"fewest_layers": 5}, "not within 1 and the drafter's own, 4"),
        (ANSWERS, {"draft_length": 7}, "block size, 6"),
        (ANSWERS, {"shortlist": 0}, "must be 1 or more"),
        (PruneAnswers(samples(1), samples(2), tuple(samples(2))), {}, "is measured, too"),
    ],
)
def test_what_can_not_be_is_refused(
    answers: PruneAnswers,
    changes: dict[str, int],
    message: str,
    target: OpenModel,
    drafter: Path,
    tmp_path: Path,
) -> None:
    with pytest.raises(InvalidRequest, match=message):
        PruningRun(
            tmp_path / "run",
            drafter,
            target,
            answers,
            PruneSettings(**{**vars(SETTINGS), **changes}),
        )


def test_another_runs_directory_is_refused_and_stays(
    target: OpenModel, drafter: Path, tmp_path: Path
) -> None:
    pruned(tmp_path / "run", drafter, target, fewest_layers=4)
    log = (tmp_path / "run" / "log.jsonl").read_text()
    with pytest.raises(InvalidRequest, match="another drafter, answers or settings"):
        pruned(tmp_path / "run", drafter, target, seed=1)
    assert (tmp_path / "run" / "log.jsonl").read_text() == log
    assert len(pruned(tmp_path / "run", drafter, target, fewest_layers=3).curve) == 2, (
        "a run may go on to fewer layers"
    )


def test_two_runs_do_not_work_in_one_directory(
    target: OpenModel, drafter: Path, tmp_path: Path
) -> None:
    run = PruningRun(tmp_path / "run", drafter, target, ANSWERS, SETTINGS)
    refused = []

    def intrude(_: Depth) -> None:
        with pytest.raises(InvalidRequest, match="another d3d prune is at work"):
            PruningRun(tmp_path / "run", drafter, target, ANSWERS, SETTINGS).run(lambda _: None)
        refused.append(True)

    run.run(intrude)
    assert refused


def a_depth(layers: int, judged: float) -> Depth:
    return Depth(layers=layers, removed=None, acceptance_length=0.0, judged=judged, checkpoint="")


CURVE = [a_depth(4, 3.0), a_depth(3, 2.98), a_depth(2, 2.4), a_depth(1, 1.2)]
TIMINGS = {
    n: DepthTiming(t_draft_ms=5.0 * n, t_verify_ms=12.0, t_plain_ms=10.0) for n in (1, 2, 3, 4)
}


def test_a_depth_is_chosen_by_share_or_by_time() -> None:
    assert choose(CURVE, {}, "share", 0.99).depth.layers == 3
    assert choose(CURVE, {}, "share", 0.79).depth.layers == 2
    assert choose(CURVE, {}, "share", 1.0).depth.layers == 4
    # serial: 32 / 3, 27 / 2.98, 22 / 2.4, 17 / 1.2; async: 20 / 3, 15 / 2.98, 12 / 2.4, 12 / 1.2
    serial, overlapped = (
        choose(CURVE, TIMINGS, "serial", 0.99),
        choose(CURVE, TIMINGS, "async", 0.99),
    )
    assert (serial.depth.layers, overlapped.depth.layers) == (3, 2)
    assert "9.06 ms, with all 4 layers 10.67 ms" in serial.reason
    assert TIMINGS[2].modelled_ms(CURVE[2].judged, "async") == pytest.approx(5.0)
    with pytest.raises(InvalidRequest, match="4 layers has not been timed"):
        choose(CURVE, {}, "serial", 0.99)


def test_passes_are_timed_on_a_drafter_as_it_decodes(drafter: Path, tmp_path: Path) -> None:
    own = open_tiny(write_tiny_target(tmp_path / "target", num_hidden_layers=4))
    timing = time_drafter(drafter, own, 4, ANSWERS.judging, 8)
    again = time_drafter(drafter, own, 4)
    assert min(timing.t_draft_ms, timing.t_verify_ms, timing.t_plain_ms, again.t_draft_ms) > 0
    assert timing.measured_plain_ms is not None
    assert timing.measured_serial_ms is not None
    assert again.measured_serial_ms is None


def test_the_checkpoints_say_how_they_were_made(
    target: OpenModel, drafter: Path, tmp_path: Path
) -> None:
    run = pruned(tmp_path / "run", drafter, target, HEAL)
    how = json.loads((run.checkpoint(run.curve[-1]) / "provenance.json").read_text())
    assert how["removed"] == [depth.removed for depth in run.curve[1:]]
    assert how["healed_steps"] == 4
    assert how["pruned_from"] == {"measured": {"acceptance_length": 1.0}}


def test_depths_of_full_weights_are_timed_one_after_the_other(
    target: OpenModel, tmp_path: Path
) -> None:
    full = write_tiny_drafter(tmp_path / "drafter", target.path, scope=None)
    assert min(time_drafter(full, target, 4).t_draft_ms for _ in range(2)) > 0
    assert not any(parameter.is_mkldnn for parameter in target.transformer.parameters()), (
        "another drafter can be loaded"
    )


def test_a_drafter_without_provenance_is_pruned_too(target: OpenModel, tmp_path: Path) -> None:
    bare = write_tiny_drafter(tmp_path / "drafter", target.path)
    (bare / "provenance.json").unlink()
    run = pruned(tmp_path / "run", bare, target, fewest_layers=4)
    assert (
        json.loads((run.checkpoint(run.curve[-1]) / "provenance.json").read_text())["pruned_from"]
        == {}
    )


@pytest.mark.parametrize("scope", ["slots", None])
def test_a_drafter_of_another_base_is_refused(
    scope: str | None, target: OpenModel, tmp_path: Path
) -> None:
    sibling = write_tiny_target(tmp_path / "sibling", num_hidden_layers=4, seed=5)
    other = write_tiny_drafter(tmp_path / "drafter", sibling, scope=scope)
    with pytest.raises(InvalidRequest, match="name its base with --target"):
        PruningRun(tmp_path / "run", other, target, ANSWERS, SETTINGS)
