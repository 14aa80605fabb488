"""The trainer on tiny drafters: it learns, goes on exactly where it stopped, and says what it could
not use."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from d3d.errors import InvalidCheckpoint, InvalidRequest
from d3d.hub.checkpoint import read_config
from d3d.hub.open_drafter import load_drafter
from d3d.hub.open_model import OpenModel
from d3d.methods.serial.drafter import BlockDrafter
from d3d.model.drafter import DeltaConfig, DrafterConfig, DrafterModel
from d3d.model.from_target import from_target
from d3d.model.linear import Linear
from d3d.model.transformer import Transformer
from d3d.target.native import NativeTarget
from d3d.train.blocks import hang_blocks
from d3d.train.config import DrafterSpec, RunConfig, Stage, TrainConfig, read_run_config
from d3d.train.corpus import Sample
from d3d.train.replay import replay
from d3d.train.run import TrainingRun
from d3d.train.trainer import (
    StepStats,
    Trainer,
    TrainingNotFinite,
    draw_anchors,
    shortest_answer,
)
from support.runs import run
from support.tiny import tiny_transformer
from support.tiny_model import open_tiny

BLOCK = 4


@pytest.fixture(scope="module")
def target() -> Transformer:
    return tiny_transformer(seed=1)


@pytest.fixture(scope="module")
def samples(target: Transformer) -> list[Sample]:
    """Greedy answers of the target."""
    engine = NativeTarget(target)
    draw = random.Random(0)
    prompts = [[draw.randrange(97) for _ in range(4 + number)] for number in range(6)]
    return [
        Sample(prompt, run(engine, None, prompt, max_tokens=24).ids, "test", 0.0, 0)
        for prompt in prompts
    ]


def make(target: Transformer, *, scope: str | None = "slots", **config: Any) -> DrafterModel:
    delta = None if scope is None else DeltaConfig(rank=8, scope=scope)  # type: ignore[arg-type]
    return from_target(
        target,
        DrafterConfig(**{"block_size": BLOCK, "kept_layers": (0, 1), "delta": delta, **config}),
    )


def config(**changes: Any) -> TrainConfig:
    stages = (Stage(share=1.0, block_size=BLOCK, anchors=8, decay=4.0),)
    return TrainConfig(
        **{
            "steps": 6,
            "warmup": 2,
            "max_length": 64,
            "learning_rate": 5e-3,
            "stages": stages,
            **changes,
        }
    )


def train(trainer: Trainer, steps: int | None = None) -> list[float]:
    losses: list[float] = []
    trainer.run(
        lambda stats: losses.append(stats.loss),
        stop=lambda: steps is not None and len(losses) >= steps,
    )
    return losses


KINDS: dict[str, dict[str, Any]] = {
    "deltas at slots": {},
    "deltas everywhere": {"scope": "all"},
    "full weights": {"scope": None},
    "same, bidirectional": {"alignment": "same", "block_attention": "bidirectional"},
    "mask token": {"mask_token_id": 96},
}
every_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())


@every_kind
def test_the_loss_falls(kind: dict[str, Any], target: Transformer, samples: list[Sample]) -> None:
    losses = train(Trainer(make(target, **kind), samples, config(steps=40)))
    assert sum(losses[-5:]) / 5 < 0.8 * sum(losses[:5]) / 5, losses


@every_kind
def test_six_steps_equal_three_and_three_more_in_a_fresh_trainer(
    kind: dict[str, Any], target: Transformer, samples: list[Sample], tmp_path: Path
) -> None:
    whole = Trainer(make(target, **kind), samples, config())
    losses = train(whole)
    first = Trainer(make(target, **kind), samples, config())
    parts = train(first, 3)
    first.save(tmp_path / "state.pt")
    second = Trainer(make(target, **kind), samples, config())
    second.load(tmp_path / "state.pt")
    assert second.step == 3
    assert parts + train(second) == losses
    assert (second.step, second.slots_seen) == (whole.step, whole.slots_seen)
    for name, parameter in whole.model.trainable().items():
        assert torch.equal(second.model.trainable()[name], parameter), name


@pytest.mark.parametrize("scope", ["slots", "all"])
def test_only_deltas_and_mask_vector_change(scope: str, samples: list[Sample]) -> None:
    target = tiny_transformer(seed=1)
    before = {name: parameter.clone() for name, parameter in target.named_parameters()}
    trainer = Trainer(make(target, scope=scope), samples, config())
    started = {name: parameter.clone() for name, parameter in trainer.model.trainable().items()}
    train(trainer)
    assert {name.split(".")[-1] for name in started} == {"up", "down", "mask_vector"}
    assert not any(
        torch.equal(trainer.model.trainable()[name], value)
        for name, value in started.items()
        if not name.endswith("down")
    )
    for name, parameter in target.named_parameters():
        assert torch.equal(parameter, before[name]), name
    assert trainer.model.transformer.embedding.data_ptr() == target.embedding.data_ptr()


def test_full_weights_leave_the_target_alone(target: Transformer, samples: list[Sample]) -> None:
    before = {name: parameter.clone() for name, parameter in target.named_parameters()}
    trainer = Trainer(make(target, scope=None), samples, config())
    train(trainer)
    assert not torch.equal(trainer.model.transformer.embedding, target.embedding)
    assert all(
        torch.equal(parameter, before[name]) for name, parameter in target.named_parameters()
    )


@pytest.mark.parametrize("alignment", ["next", "same"])
@pytest.mark.parametrize("attention", ["causal", "bidirectional"])
def test_one_answer_learnt_by_heart_is_drafted_whole(
    alignment: str, attention: str, target: Transformer, samples: list[Sample]
) -> None:
    """By replay and by real decoding: training, evaluation and drafting agree on who predicts
    what."""
    model = make(target, alignment=alignment, block_attention=attention)
    sample = samples[0]
    anchors = (Stage(share=1.0, block_size=BLOCK, anchors=24, decay=10.0),)
    train(
        Trainer(
            model,
            [sample],
            config(steps=150, answers_per_step=1, stages=anchors, learning_rate=1e-2),
        )
    )
    model.eval()
    replayed = replay(model, [sample], BLOCK)
    drafter = BlockDrafter(model, target.config.vocab_size)
    decoded = run(
        NativeTarget(target), drafter, sample.prompt_ids, draft_length=BLOCK, max_tokens=24
    )
    assert decoded.ids == sample.answer_ids
    assert replayed.acceptance_length > BLOCK + 0.5, replayed
    assert len(decoded.rounds) == replayed.rounds
    assert (
        sum(stats.num_committed for stats in decoded.rounds) / len(decoded.rounds)
        == replayed.acceptance_length
    )


def test_stages_follow_their_shares() -> None:
    stages = (
        Stage(share=0.5, block_size=2, anchors=1, decay=1.0),
        Stage(share=0.5, block_size=4, anchors=1, decay=1.0),
    )
    plan = config(steps=10, stages=stages)
    assert [plan.stage(step).block_size for step in range(10)] == [2] * 5 + [4] * 5


@pytest.mark.parametrize("shares", [(0.5, 0.4), (1.0, 0.5), ()])
def test_shares_that_do_not_sum_to_one_are_refused(shares: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match=r"sum to 1|at least 1 item"):
        config(
            stages=tuple(Stage(share=share, block_size=2, anchors=1, decay=1.0) for share in shares)
        )


def test_other_schedules_fall_to_the_floor_or_not_at_all() -> None:
    linear = config(steps=100, warmup=0, learning_rate=1.0, schedule="linear", floor=0.2)
    assert [linear.learning_rate_at(step) for step in (0, 50, 100)] == pytest.approx(
        [1.0, 0.6, 0.2]
    )
    constant = config(steps=100, warmup=2, learning_rate=1.0, schedule="constant")
    assert {constant.learning_rate_at(step) for step in range(2, 100)} == {1.0}


@pytest.mark.parametrize("scope", ["slots", "all", None])
def test_computing_layers_twice_gives_the_same_training(
    scope: str | None, target: Transformer, samples: list[Sample]
) -> None:
    once = Trainer(make(target, scope=scope), samples, config(steps=3))
    twice = Trainer(
        make(target, scope=scope), samples, config(steps=3, activation_checkpointing=True)
    )
    calls = [0, 0]

    def count(place: int) -> Any:
        def hook(*_: object) -> None:
            calls[place] += torch.is_grad_enabled()

        return hook

    for place, trainer in enumerate((once, twice)):
        trainer.model.transformer.layers[0].mlp_norm.register_forward_hook(count(place))  # type: ignore[operator, union-attr]
    assert train(once) == pytest.approx(train(twice), rel=1e-6)
    assert calls[1] == 2 * calls[0]
    for name, parameter in once.model.trainable().items():
        torch.testing.assert_close(twice.model.trainable()[name], parameter, atol=1e-6, rtol=0)


def test_the_learning_rate_warms_up_and_falls_to_a_twentieth() -> None:
    plan = config(steps=100, warmup=10, learning_rate=1.0)
    rates = [plan.learning_rate_at(step) for step in range(100)]
    assert rates[:10] == [pytest.approx((step + 1) / 10) for step in range(10)]
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[-1] == pytest.approx(0.05, abs=0.01)


def test_a_stage_wider_than_the_drafter_is_refused(
    target: Transformer, samples: list[Sample]
) -> None:
    stages = (Stage(share=1.0, block_size=BLOCK + 1, anchors=1, decay=1.0),)
    with pytest.raises(InvalidRequest, match="a block_size of 5 is above the drafter's own, 4"):
        Trainer(make(target), samples, config(stages=stages))


def test_samples_that_do_not_fit_are_counted_by_reason(
    target: Transformer, samples: list[Sample]
) -> None:
    odd = [
        Sample([1] * 62, [2] * 20, "long", 0.0, 0),
        Sample([1] * 200, [2] * 20, "long", 0.0, 0),
        Sample([1, 2], [3, 4], "short", 0.0, 0),
        Sample([], [3, 4, 5], "no prompt", 0.0, 0),
    ]
    trainer = Trainer(make(target), [*odd, *samples], config())
    assert trainer.samples == samples
    assert sorted(trainer.left_out.values()) == [1, 1, 2]
    assert all(torch.isfinite(torch.tensor(train(trainer))))


def test_a_corpus_without_a_usable_sample_is_an_error_that_says_why(target: Transformer) -> None:
    with pytest.raises(
        InvalidRequest,
        match=r"2 because the prompt leaves no room for an answer in a max_length of 64",
    ):
        Trainer(make(target), [Sample([1] * 64, [2] * 9, "x", 0.0, 0)] * 2, config())
    with pytest.raises(InvalidRequest, match="it is empty"):
        Trainer(make(target), [], config())


def test_a_text_longer_than_max_length_is_cut_and_trained(target: Transformer) -> None:
    trainer = Trainer(
        make(target),
        [Sample([1, 2, 3], list(range(4, 90)), "x", 0.0, 0)],
        config(steps=2, max_length=16),
    )
    assert all(loss > 0 for loss in train(trainer))


def test_an_answer_of_three_tokens_is_enough(target: Transformer) -> None:
    for kind in KINDS.values():
        losses = train(
            Trainer(make(target, **kind), [Sample([1, 2], [3, 4, 5], "x", 0.0, 0)], config(steps=2))
        )
        assert all(torch.isfinite(torch.tensor(losses)))


@pytest.mark.parametrize(
    ("kind", "shortest"), [({}, 3), ({"anchor_slot": True}, 2), ({"alignment": "same"}, 2)], ids=str
)
def test_every_anchor_whose_first_slot_has_a_token_is_trained(
    kind: dict[str, Any], shortest: int, target: Transformer
) -> None:
    """A drafter's first slot predicts the next token, unless the anchor's own row does."""
    model = make(target, **kind)
    answers = [Sample([1, 2], list(range(3, 3 + length)), "x", 0.0, 0) for length in (1, 2, 3)]
    trainer = Trainer(model, answers, config(steps=2))
    assert [len(sample.answer_ids) for sample in trainer.samples] == [
        length for length in (1, 2, 3) if length >= shortest
    ]
    assert all(loss > 0 for loss in train(trainer))
    stage = Stage(share=1.0, block_size=4, anchors=99)
    places = draw_anchors(answers[2], stage, 64, random.Random(0), shortest_answer(model.config))
    assert places == list(range(2, 2 + 3 - shortest + 1))
    batch = hang_blocks(torch.arange(5), torch.tensor(places), 1, model.config)
    assert batch.targets[:, 0].tolist()[-1] == 4, "the answer's last token"


def test_the_cause_of_what_is_not_finite_is_named(target: Transformer) -> None:
    samples = [Sample([1, 2], [3, 4, 5], "x", 0.0, 0)]
    model = make(target)
    next(iter(model.trainable().values())).data.fill_(float("nan"))
    with pytest.raises(TrainingNotFinite, match=r"weights that are trained .* lower learning_rate"):
        train(Trainer(model, samples, config(steps=1)))
    model = make(tiny_transformer())
    model.transformer.layers[0].down.weight.data[0] = float("nan")  # type: ignore[operator,union-attr]
    with pytest.raises(TrainingNotFinite, match=r"base's weights .*down.weight.* fetch the model"):
        train(Trainer(model, samples, config(steps=1)))


@pytest.mark.parametrize("poison", ["weights", "gradient"])
def test_what_is_not_finite_stops_with_step_and_sample_and_leaves_the_weights(
    poison: str, target: Transformer, samples: list[Sample], monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = Trainer(make(target), samples, config(answers_per_step=1))
    train(trainer, 2)
    before = {
        name: parameter.detach().clone() for name, parameter in trainer.model.trainable().items()
    }
    real = Trainer._loss

    def poisoned(self: Trainer, *arguments: Any) -> tuple[torch.Tensor, int]:
        loss, count = real(self, *arguments)
        if poison == "weights":
            return loss * float("nan"), count
        zero = (self.model.mask_vector * 0).sum()  # type: ignore[operator]
        return loss + torch.sqrt(zero), count  # finite, with an infinite slope

    monkeypatch.setattr(Trainer, "_loss", poisoned)
    message = "is not finite .* in training step 2, in an answer of test: the weights are finite; "
    with pytest.raises(TrainingNotFinite, match=message + "lower learning_rate") as raised:
        train(trainer)
    assert len(raised.value.samples) == 1
    assert raised.value.samples[0] in samples
    assert trainer.step == 2
    for name, parameter in trainer.model.trainable().items():
        assert torch.equal(parameter, before[name]), name


@pytest.mark.parametrize("change", [{"learning_rate": 1e-4}, {"steps": 7}])
def test_another_training_configuration_cannot_go_on(
    change: dict[str, Any], target: Transformer, samples: list[Sample], tmp_path: Path
) -> None:
    Trainer(make(target), samples, config()).save(tmp_path / "state.pt")
    with pytest.raises(
        InvalidRequest, match="another training configuration; choose another output directory"
    ):
        Trainer(make(target), samples, config(**change)).load(tmp_path / "state.pt")


def test_another_drafter_cannot_go_on(
    target: Transformer, samples: list[Sample], tmp_path: Path
) -> None:
    Trainer(make(target), samples, config()).save(tmp_path / "state.pt")
    with pytest.raises(InvalidRequest, match="another drafter configuration"):
        Trainer(make(target, alignment="same"), samples, config()).load(tmp_path / "state.pt")


def test_a_damaged_state_is_named(
    target: Transformer, samples: list[Sample], tmp_path: Path
) -> None:
    trainer = Trainer(make(target), samples, config())
    file = tmp_path / "state.pt"
    for content in (b"", b"nonsense" * 50):
        file.write_bytes(content)
        with pytest.raises(InvalidRequest, match=r"state\.pt is damaged"):
            trainer.load(file)


def test_a_save_that_is_killed_leaves_the_older_state(
    target: Transformer, samples: list[Sample], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = Trainer(make(target), samples, config())
    trainer.save(tmp_path / "state.pt")
    train(trainer, 1)

    def killed(_state: object, path: Path) -> None:
        path.write_bytes(b"half")
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(torch, "save", killed)
        with pytest.raises(KeyboardInterrupt):
            trainer.save(tmp_path / "state.pt")
    fresh = Trainer(make(target), samples, config())
    fresh.load(tmp_path / "state.pt")
    assert fresh.step == 0
    trainer.save(tmp_path / "state.pt")
    fresh.load(tmp_path / "state.pt")
    assert fresh.step == 1


# A run in a directory


@pytest.fixture(scope="module")
def base(tiny_target: Path) -> OpenModel:
    return open_tiny(tiny_target)


def run_config(**changes: Any) -> RunConfig:
    drafter = DrafterSpec(block_size=BLOCK, delta=DeltaConfig(rank=4))
    return RunConfig(
        **{
            "drafter": drafter,
            "train": config(),
            "evaluate_every": 2,
            "evaluate_draft_length": BLOCK,
            **changes,
        }
    )


@pytest.fixture(scope="module")
def texts(base: OpenModel) -> list[Sample]:
    engine = NativeTarget(base.transformer)
    return [
        Sample([first, 9, 30], run(engine, None, [first, 9, 30], max_tokens=20).ids, "test", 0.0, 0)
        for first in range(10, 16)
    ]


def test_a_run_keeps_the_best_and_its_measure(
    base: OpenModel, texts: list[Sample], tmp_path: Path
) -> None:
    training = TrainingRun(tmp_path, base, run_config(), texts[:4], texts[4:])
    training.run(lambda _: None)
    rows = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [2, 4, 6]
    assert training.best == max(row["acceptance_length"] for row in rows) >= 1
    provenance = json.loads((tmp_path / "best" / "provenance.json").read_text())
    assert provenance["measured"]["acceptance_length"] == training.best
    assert provenance["sources"] == {"test": 4}
    assert read_config(tmp_path / "best").drafter.block_size == BLOCK
    load_drafter(tmp_path / "best", base)


@pytest.mark.parametrize("torn", ["", '{"target": "x", "measured": {"acc', '{"target": "x"}'])
def test_a_best_checkpoint_that_can_not_be_compared_is_not_replaced(
    torn: str, base: OpenModel, texts: list[Sample], tmp_path: Path
) -> None:
    def start() -> TrainingRun:
        return TrainingRun(tmp_path, base, run_config(), texts[:4], texts[4:])

    training = start()
    training.run(lambda _: None, stop=lambda: training.trainer.step >= 2)
    (tmp_path / "best" / "provenance.json").write_text(torn)
    with pytest.raises(InvalidRequest, match="move it out of the directory"):
        start()
    shutil.move(tmp_path / "best", tmp_path.with_name(f"{tmp_path.name}-best"))
    start().run(lambda _: None)
    assert (tmp_path / "best").is_dir()
    (tmp_path / "state.pt").unlink()
    with pytest.raises(InvalidRequest, match=r"best holds a drafter, and .* no state"):
        start()


def test_a_second_run_touches_nothing(base: OpenModel, texts: list[Sample], tmp_path: Path) -> None:
    """Not even what looks as if the first had been killed in the middle of a replacement."""
    first = TrainingRun(tmp_path, base, run_config(), texts[:4], texts[4:])
    (tmp_path / ".best.old").mkdir()
    with pytest.raises(InvalidRequest, match="another d3d train is at work"):
        TrainingRun(tmp_path, base, run_config(), texts[:4], texts[4:])
    assert (tmp_path / ".best.old").exists()
    assert not (tmp_path / "best").exists()
    first.run(lambda _: None, stop=lambda: True)


def test_two_runs_do_not_work_in_one_directory(
    base: OpenModel, texts: list[Sample], tmp_path: Path
) -> None:
    refused = []

    def intrude(_: StepStats) -> None:
        with pytest.raises(InvalidRequest, match="another d3d train is at work"):
            TrainingRun(tmp_path, base, run_config(), texts[:4], texts[4:]).run(lambda _: None)
        refused.append(True)

    TrainingRun(tmp_path, base, run_config(), texts[:4], texts[4:]).run(intrude)
    assert refused


def test_the_untrained_start_is_measured_where_that_is_wanted(
    base: OpenModel, texts: list[Sample], tmp_path: Path
) -> None:
    training = TrainingRun(tmp_path, base, run_config(measure_start=True), texts[:4], texts[4:])
    training.run(lambda _: None, stop=lambda: training.trainer.step >= 1)
    TrainingRun(tmp_path, base, run_config(measure_start=True), texts[:4], texts[4:]).run(
        lambda _: None
    )
    rows = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 2, 4, 6]
    assert rows[0]["loss"] is None
    assert rows[0]["acceptance_length"] >= 1


def test_a_run_of_an_older_version_that_knew_fewer_keys_is_gone_on_with(
    base: OpenModel, texts: list[Sample], tmp_path: Path
) -> None:
    first = TrainingRun(tmp_path, base, run_config(), texts[:4], texts[4:])
    first.run(lambda _: None, stop=lambda: first.trainer.step >= 3)
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    older = json.loads(state["training"])
    for key in (
        "schedule",
        "floor",
        "precision",
        "activation_checkpointing",
        "distributed",
        "teacher",
    ):
        del older[key]
    state["training"] = json.dumps(older)
    del state["base"], state["corpus"]
    torch.save(state, tmp_path / "state.pt")
    assert TrainingRun(tmp_path, base, run_config(), texts[:4], texts[4:]).trainer.step == 3


def test_a_run_goes_on_with_its_own_corpus_only(
    base: OpenModel, texts: list[Sample], tmp_path: Path
) -> None:
    first = TrainingRun(tmp_path, base, run_config(), texts[:4], texts[4:])
    first.run(lambda _: None, stop=lambda: first.trainer.step >= 1)
    with pytest.raises(InvalidRequest, match="belongs to a run with another corpus"):
        TrainingRun(tmp_path, base, run_config(), texts[:3], texts[4:])


def test_a_run_that_is_stopped_goes_on_to_the_same_end(
    base: OpenModel, texts: list[Sample], tmp_path: Path
) -> None:
    whole = TrainingRun(tmp_path / "whole", base, run_config(), texts[:4], texts[4:])
    whole.run(lambda _: None)
    first = TrainingRun(tmp_path / "parts", base, run_config(), texts[:4], texts[4:])
    first.run(lambda _: None, stop=lambda: first.trainer.step >= 3)
    with (tmp_path / "parts" / "log.jsonl").open("a") as file:
        file.write('{"step": 4, "lo')  # a killed writer
    second = TrainingRun(tmp_path / "parts", base, run_config(), texts[:4], texts[4:])
    assert second.trainer.step == 3
    assert second.best == first.best
    second.run(lambda _: None)
    assert second.best == whole.best
    for name, parameter in whole.model.trainable().items():
        assert torch.equal(second.model.trainable()[name], parameter), name
    logs = [
        [json.loads(line) for line in (tmp_path / name / "log.jsonl").read_text().splitlines()]
        for name in ("whole", "parts")
    ]
    steps = [[(row["step"], row["loss"], row["acceptance_length"]) for row in log] for log in logs]
    assert steps[0] == steps[1]


def test_a_run_that_is_killed_between_two_measurements_loses_little(
    base: OpenModel, texts: list[Sample], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("d3d.train.run.STATE_EVERY_S", -1.0)
    killed = TrainingRun(tmp_path, base, run_config(evaluate_every=100), texts[:4], texts[4:])

    def die(stats: StepStats) -> None:
        if stats.step == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        killed.run(die)
    assert (
        TrainingRun(
            tmp_path, base, run_config(evaluate_every=100), texts[:4], texts[4:]
        ).trainer.step
        == 3
    )


def test_held_out_prompts_are_not_trained_on(
    base: OpenModel, texts: list[Sample], tmp_path: Path
) -> None:
    training = TrainingRun(tmp_path, base, run_config(), texts, texts[4:])
    assert training.trainer.samples == texts[:4]
    assert training.left_out == {"their prompt is held out": 2}


def test_a_held_out_corpus_without_rounds_is_refused(
    base: OpenModel, texts: list[Sample], tmp_path: Path
) -> None:
    with pytest.raises(InvalidRequest, match="nothing can be measured"):
        TrainingRun(tmp_path, base, run_config(), texts, [Sample([1], [2], "x", 0.0, 0)])


def test_a_mask_token_that_means_something_is_refused_before_training(
    base: OpenModel, texts: list[Sample], tmp_path: Path
) -> None:
    spec = DrafterSpec(block_size=BLOCK, mask_token_id=base.tokenizer.eos_token_id)
    with pytest.raises(InvalidCheckpoint, match="the end-of-answer token"):
        TrainingRun(tmp_path, base, run_config(drafter=spec), texts[:4], texts[4:])


def test_a_failure_keeps_the_steps_before_it(
    base: OpenModel, texts: list[Sample], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = TrainingRun(tmp_path, base, run_config(evaluate_every=100), texts[:4], texts[4:])
    real = Trainer._loss

    def poisoned(self: Trainer, *arguments: Any) -> tuple[torch.Tensor, int]:
        loss, count = real(self, *arguments)
        return (loss * float("nan") if self.step == 3 else loss), count

    with monkeypatch.context() as patched:
        patched.setattr(Trainer, "_loss", poisoned)
        with pytest.raises(TrainingNotFinite, match="step 3"):
            training.run(lambda _: None)
    again = TrainingRun(tmp_path, base, run_config(evaluate_every=100), texts[:4], texts[4:])
    assert again.trainer.step == 3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "drafter: {block_sise: 4}",
            "drafter.block_sise: there is no such key; there are: base, block_size",
        ),
        ("stepz: 4", "stepz: there is no such key; there are: target, drafter, train"),
        (
            "train: {stages: [{share: 1, block_size: 4, anchors: 2, decai: 3}]}",
            "stages.0.decai: there is no such key; there are: share, block_size, anchors, decay",
        ),
        ("train: {steps: 0}", "train.steps"),
        ("evaluate_every: 0", "evaluate_every"),
        (
            "drafter: {block_size: 4}",
            "evaluate_draft_length (8) is above the drafter's block_size (4)",
        ),
        (
            "train: {stages: [{share: 0.5, block_size: 4, anchors: 2, decay: 3}]}",
            "train: the shares of the stages must sum to 1, not 0.5",
        ),
        ("a: [", "can't be read"),
        ("- 1", "Input should be a valid dictionary"),
    ],
)
def test_a_wrong_configuration_file_is_refused_by_its_key(
    text: str, message: str, tmp_path: Path
) -> None:
    file = tmp_path / "train.yaml"
    file.write_text(text)
    with pytest.raises(InvalidRequest) as caught:
        read_run_config(file)
    assert message in str(caught.value)


def test_a_missing_configuration_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"none\.yaml can't be read"):
        read_run_config(tmp_path / "none.yaml")


def test_layers_in_another_order_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="kept_layers must be ascending"):
        DrafterSpec(kept_layers=(1, 0)).resolve(2)
    with pytest.raises(InvalidRequest, match="kept_layers"):
        DrafterSpec(kept_layers=()).resolve(2)


def test_every_decoder_matrix_gets_a_delta(target: Transformer) -> None:
    model = make(target)
    matrices = [
        module for module in model.transformer.layers.modules() if isinstance(module, Linear)
    ]
    assert len(matrices) == 8
    assert all(module.up is not None for module in matrices)
