"""`d3d train`: plans, drafters of another model, curves, several processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from d3d.cli.training_view import LiveView
from d3d.errors import InvalidCheckpoint
from d3d.hub.checkpoint import read_config
from d3d.hub.open_drafter import load_drafter
from d3d.hub.open_model import OpenModel
from d3d.train.config import RunConfig
from d3d.train.corpus import Sample
from d3d.train.objective import AnswerLoss
from d3d.train.run import Author, TrainingRun
from d3d.train.trainer import StepStats, Trainer
from support.command import Outcome, d3d
from support.tiny_model import open_tiny, write_tiny_target

CONFIG = """
drafter: {block_size: 4, delta: {rank: 4}%s}
train: {steps: 4, warmup: 2, answers_per_step: 2, learning_rate: 5.0e-3,
  stages: [{share: 1.0, block_size: 4, anchors: 6}]%s}
evaluate_every: 2
evaluate_draft_length: 4
%s
"""


def config(path: Path, drafter: str = "", train: str = "", rest: str = "") -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / "train.yaml").write_text(
        CONFIG % (drafter and f", {drafter}", train and f", {train}", rest)
    )
    return path / "train.yaml"


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three layers, where the sibling has two."""
    return write_tiny_target(
        tmp_path_factory.mktemp("target") / "target", num_hidden_layers=3, seed=5
    )


@pytest.fixture(scope="module")
def corpora(target: Path) -> tuple[Path, Path]:
    """Written by the target: to train on, and held out."""
    found = []
    for name, prompts in (
        ("train", ["how much is two?", "the cat sat", "on the mat", "hello café"]),
        ("held", ["hello", "who are you?"]),
    ):
        source = target.parent / f"{name}_prompts.jsonl"
        source.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
        found.append(target.parent / f"{name}.jsonl")
        outcome = d3d(
            "data",
            found[-1],
            "--prompts",
            source,
            "--target",
            target,
            "--dtype",
            "float32",
            "--max-tokens",
            16,
        )
        assert outcome.code == 0, outcome.err
    return found[0], found[1]


def train(
    target: Path, corpora: tuple[Path, Path], output: Path, settings: Path, *more: object
) -> Outcome:
    given = (
        "--held-out",
        corpora[1],
        "--target",
        target,
        "--config",
        settings,
        "--dtype",
        "float32",
        "--device",
        "cpu",
    )
    return d3d("train", corpora[0], output, *given, *more)


# A base that is not the target


@pytest.mark.parametrize(
    "weights", ["delta: null", "delta: {rank: 4}"], ids=["full weights", "deltas"]
)
def test_a_drafter_of_a_smaller_sibling_drafts_for_the_target(
    weights: str, target: Path, tiny_target: Path, corpora: tuple[Path, Path], tmp_path: Path
) -> None:
    settings = config(tmp_path, f"base: {tiny_target}")
    settings.write_text(settings.read_text().replace("delta: {rank: 4}", weights, 1))
    trained = train(target, corpora, tmp_path / "run", settings)
    assert trained.code == 0, trained.err
    best = tmp_path / "run" / "best"
    assert read_config(best).base.source == str(tiny_target)
    assert read_config(best).drafter.kept_layers == (0, 1)
    assert json.loads((best / "provenance.json").read_text())["target"] == str(target)
    opened = open_tiny(target)
    assert len(load_drafter(best, opened).transformer.layers) == 2
    common = (
        "--prompt",
        "hello",
        "--target",
        target,
        "--dtype",
        "float32",
        "--max-tokens",
        20,
        "--json",
    )
    plain = d3d("generate", *common, "--mode", "plain").record
    drafted = d3d("generate", *common, "--mode", "serial", "--drafter", best).record
    assert drafted["token_ids"] == plain["token_ids"]
    assert drafted["speculation"]["rounds"] > 0


def test_a_base_with_another_tokenizer_is_refused(
    target: Path, corpora: tuple[Path, Path], tmp_path: Path
) -> None:
    other = write_tiny_target(tmp_path / "other", texts=["quite another text"] * 4)
    outcome = train(target, corpora, tmp_path / "run", config(tmp_path, f"base: {other}"))
    assert outcome.is_refusal("drafter.base", "can't be made a drafter of", "token id")
    assert not (tmp_path / "run").exists()


def test_a_corpus_with_ids_that_the_base_lacks_is_refused(
    tiny_target: Path, tmp_path: Path
) -> None:
    base = open_tiny(tiny_target)
    samples = [Sample([1, 2], [3, 4, base.config.vocab_size], "x", 0.0, 0)]
    with pytest.raises(InvalidCheckpoint, match="has embeddings for ids below"):
        TrainingRun(
            tmp_path, base, RunConfig(), samples, samples, author=Author("target", base.tokenizer)
        )


def test_distillation_from_a_base_that_is_not_the_target_is_refused(
    tiny_target: Path, target: Path, corpora: tuple[Path, Path], tmp_path: Path
) -> None:
    settings = config(tmp_path, f"base: {tiny_target}", "distillation: 0.5")
    assert train(target, corpora, tmp_path / "run", settings).is_refusal(
        "distillation", "a drafter with another base has none"
    )


@pytest.mark.parametrize(
    "weights", ["delta: null", "delta: {rank: 4}"], ids=["full weights", "deltas"]
)
def test_logits_that_the_target_recorded_teach_a_sibling(
    weights: str, tiny_target: Path, target: Path, corpora: tuple[Path, Path], tmp_path: Path
) -> None:
    prompts, corpus = tmp_path / "prompts.jsonl", tmp_path / "corpus.jsonl"
    prompts.write_text('{"prompt": "how much is two?"}\n{"prompt": "the cat sat"}\n')
    data = (
        "data",
        corpus,
        "--prompts",
        prompts,
        "--target",
        target,
        "--dtype",
        "float32",
        "--max-tokens",
        16,
        "--top-logits",
        5,
    )
    assert d3d(*data).code == 0
    losses = []
    for share in (0.0, 0.5):
        settings = config(
            tmp_path, f"base: {tiny_target}", f"distillation: {share}, teacher: recorded"
        )
        settings.write_text(settings.read_text().replace("delta: {rank: 4}", weights, 1))
        outcome = train(target, (corpus, corpora[1]), tmp_path / f"run{share}", settings)
        assert outcome.code == 0, outcome.err
        losses.append(
            [
                json.loads(line)["loss"]
                for line in (tmp_path / f"run{share}" / "log.jsonl").read_text().splitlines()
            ]
        )
    assert losses[0] != losses[1]
    assert train(target, corpora, tmp_path / "other", settings).is_refusal(
        "holds no logits of its target", "--top-logits"
    )


def test_a_run_is_not_gone_on_with_from_another_base(
    target: Path, corpora: tuple[Path, Path], tmp_path: Path
) -> None:
    outcomes = []
    for seed in (1, 2):
        base = write_tiny_target(tmp_path / f"base{seed}", seed=seed)
        settings = config(tmp_path / str(seed), f"base: {base}")
        outcomes.append(train(target, corpora, tmp_path / "run", settings))
    assert outcomes[0].code == 0, outcomes[0].err
    assert outcomes[1].is_refusal("belongs to a run with another base")


# Keys


def test_the_target_may_stand_in_the_file(
    target: Path, corpora: tuple[Path, Path], tmp_path: Path
) -> None:
    settings = config(tmp_path, rest=f"target: {target}")
    given = (
        corpora[0],
        tmp_path / "run",
        "--held-out",
        corpora[1],
        "--config",
        settings,
        "--dtype",
        "float32",
        "--device",
        "cpu",
    )
    assert d3d("train", *given).out == f"{tmp_path / 'run' / 'best'}\n"


@pytest.mark.parametrize(
    "weights", ["delta: null", "delta: {rank: 4}"], ids=["full weights", "deltas"]
)
def test_precision_is_what_is_computed_in_and_trained_weights_are_float32(
    weights: str, target: Path, tmp_path: Path
) -> None:
    from d3d.hub.open_model import open_model
    from support.parallel_worker import texts

    opened = open_model(str(target), device="cpu", dtype="bfloat16")
    settings = config(tmp_path, train="precision: bfloat16")
    settings.write_text(settings.read_text().replace("delta: {rank: 4}", weights, 1))
    from d3d.train.config import read_run_config

    run = TrainingRun(
        tmp_path / "run", opened, read_run_config(settings), texts(opened)[:4], texts(opened)[4:]
    )
    seen = set()
    run.model.transformer.layers[0].register_forward_hook(
        lambda _module, _inputs, _output: seen.add(torch.is_autocast_enabled("cpu"))
    )
    run.run(lambda _: None)
    assert {parameter.dtype for parameter in run.model.trainable().values()} == {torch.float32}
    full = weights == "delta: null"
    assert seen == {full}, "full weights are float32 and computed in bfloat16"
    assert run.model.transformer.dtype == (torch.float32 if full else torch.bfloat16)
    assert run.acceptance is not None


def test_curves_hold_every_step_and_every_measurement(
    target: Path, corpora: tuple[Path, Path], tmp_path: Path
) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    settings = config(tmp_path, rest="tensorboard: true\nbonus_recall: true")
    assert train(target, corpora, tmp_path / "run", settings).code == 0
    events = accumulator.EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    assert [event.step for event in events.Scalars("train/loss")] == [1, 2, 3, 4]
    rows = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    lengths = [event.value for event in events.Scalars("held_out/acceptance_length")]
    assert lengths == pytest.approx([row["acceptance_length"] for row in rows])
    assert (
        len([tag for tag in events.Tags()["scalars"] if tag.startswith("held_out/acceptance_at_")])
        == 4
    )
    assert rows[0]["bonus_recall"].keys() == {"1", "4", "16"}


def test_curves_without_tensorboard_name_the_extra(
    target: Path, corpora: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    outcome = train(target, corpora, tmp_path / "run", config(tmp_path, rest="tensorboard: true"))
    assert outcome.is_refusal("pip install 'd3d-decoding[train]'")


def test_the_live_view_shows_losses_speed_and_acceptance(tiny_target: Path, tmp_path: Path) -> None:
    from rich.console import Console
    from rich.live import Live
    from rich.progress import Progress

    from support.parallel_worker import run_config, texts

    base: OpenModel = open_tiny(tiny_target)
    settings = run_config("deltas").model_copy(update={"bonus_recall": True})
    run = TrainingRun(tmp_path, base, settings, texts(base)[:4], texts(base)[4:])
    console = Console(record=True, width=120, force_terminal=True, file=open(os.devnull, "w"))  # noqa: SIM115
    view = LiveView(run, Live(console=console, auto_refresh=False), Progress(console=console))
    view.show(StepStats(1, 4.0, 50, 0.5))
    console.print(view.live.get_renderable())
    assert "first measured at step 2" in console.export_text()
    run.run(view.show)
    view.show(StepStats(4, 2.0, 50, 0.5))
    console.print(view.live.get_renderable())
    text = console.export_text()
    for words in (
        "last 2.000",
        "100 slots/s",
        f"best {run.best:.3f}",
        "acceptance at 1, 2",
        "bonus in top 16",
    ):
        assert words in text, text


# --dry-run


def test_a_dry_run_measures_the_rate_counts_the_corpus_and_leaves_nothing(
    target: Path, corpora: tuple[Path, Path], tmp_path: Path
) -> None:
    before = sorted(tmp_path.rglob("*"))
    settings = config(tmp_path / "settings")
    given = (
        "--target",
        target,
        "--config",
        settings,
        "--dtype",
        "float32",
        "--device",
        "cpu",
        "--dry-run",
    )
    outcome = d3d("train", corpora[0], *given)
    assert outcome.code == 0, outcome.err
    lines = dict(line.split("  ", 1) for line in outcome.out.splitlines())
    assert "4 answers, 2.00 epochs" in lines["corpus"]
    assert "3 of 3 layers kept" in lines["base"]
    assert "measured here" in lines["rate"]
    assert lines["peak memory"].endswith("fits")
    assert sorted(tmp_path.rglob("*")) == [*before, tmp_path / "settings", settings]


def test_flags_that_mean_nothing_are_refused(
    target: Path, corpora: tuple[Path, Path], tmp_path: Path
) -> None:
    settings = config(tmp_path)
    assert d3d("train", "--config", settings).is_refusal("give a corpus")
    assert train(target, corpora, tmp_path / "run", settings, "--tflops", 3).is_refusal(
        "for --dry-run"
    )
    assert train(target, corpora, tmp_path / "run", settings, "--processes", 2).is_refusal(
        "for --dry-run"
    )
    assert train(
        target, corpora, tmp_path / "run", settings, "--dry-run", "--minutes", 3
    ).is_refusal("--minutes")


def test_a_dry_run_without_the_model_needs_its_config(tmp_path: Path) -> None:
    settings = config(tmp_path, rest="target: {source: nobody/nothing, config: models/nothing}")
    assert d3d("train", "--config", settings, "--dry-run").is_refusal(
        "the config of nobody/nothing, is not there"
    )


# torchrun


@pytest.mark.slow
def test_torchrun_trains_in_two_processes(
    target: Path, corpora: tuple[Path, Path], tmp_path: Path
) -> None:
    settings, output = config(tmp_path), tmp_path / "run"
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "-m",
        "d3d.cli.app",
        "train",
    ]
    command += [
        str(corpora[0]),
        str(output),
        "--held-out",
        str(corpora[1]),
        "--target",
        str(target),
        "--config",
        str(settings),
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [*command, "--dtype", "float32", "--device", "cpu"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{output / 'best'}\n"
    assert done.stderr.count("step 4 of 4") == 1
    alone = tmp_path / "alone"
    assert train(target, corpora, alone, settings).code == 0
    measured = [
        json.loads((directory / "log.jsonl").read_text().splitlines()[-1])
        for directory in (output, alone)
    ]
    assert measured[0]["loss"] == pytest.approx(measured[1]["loss"], abs=1e-5)
    assert measured[0]["slots"] == measured[1]["slots"]


def test_a_loss_that_is_not_finite_is_told_with_the_line_of_its_answer(
    target: Path, corpora: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Samples that are left out do not shift the line."""
    corpus, held_out = corpora
    lines = corpus.read_text().splitlines()
    row = json.loads(lines[1])
    short = [json.dumps({**row, "answer_ids": [5], "seed": n}) for n in range(3)]
    bad = json.dumps({**row, "answer_ids": [77, 78, 79, 80], "source": "row6"})
    path = tmp_path / "c.jsonl"
    path.write_text("\n".join([lines[0], *short, *lines[1:], bad]) + "\n")
    real = Trainer._loss

    def poisoned(self: Trainer, sample: Sample, *arguments: Any) -> AnswerLoss:
        loss, slots = real(self, sample, *arguments)
        return AnswerLoss(loss * (float("nan") if sample.source == "row6" else 1.0), slots)

    monkeypatch.setattr(Trainer, "_loss", poisoned)
    result = d3d(
        "train", path, tmp_path / "run", "--held-out", held_out, "--target", target,
        "--config", config(tmp_path), "--dtype", "float32",
    )  # fmt: skip
    assert result.code == 2
    assert f"in an answer of row6 ({path}, line {len(lines) + 4})" in result.err
