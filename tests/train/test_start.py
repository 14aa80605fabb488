"""A run that starts from a drafter that is there already."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from d3d.errors import InvalidCheckpoint
from d3d.hub.checkpoint import save_drafter
from d3d.hub.open_drafter import load_drafter
from d3d.hub.open_model import OpenModel
from d3d.model.choice import SEEN_TOKENS
from d3d.model.drafter import DeltaConfig
from d3d.model.linear import Linear
from d3d.train.config import DrafterSpec, RunConfig, Stage, TrainConfig
from d3d.train.corpus import Sample
from d3d.train.run import TrainingRun
from support.tiny_model import open_tiny, random_drafter, write_tiny_target

TEXTS = [Sample([first, 9, 30], [5, 6, 7, 8, 9, 10, 11], "test", 0.0, 0) for first in range(10, 14)]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> OpenModel:
    return open_tiny(write_tiny_target(tmp_path_factory.mktemp("target")))


@pytest.fixture
def older(base: OpenModel, tmp_path: Path) -> Path:
    save_drafter(tmp_path / "older", random_drafter(base), base, storage="float32")
    return tmp_path / "older"


def a_run(
    path: Path,
    base: OpenModel,
    start: Path,
    rank: int = 4,
    head: int | None = None,
    alignment: str = "next",
) -> TrainingRun:
    drafter = DrafterSpec(
        block_size=8,
        delta=DeltaConfig(rank=rank),
        previous_token_width=head,
        start=str(start),
        alignment=alignment,
    )
    return begin(path, base, drafter)


def begin(path: Path, base: OpenModel, drafter: DrafterSpec) -> TrainingRun:
    training = TrainConfig(steps=1, stages=(Stage(share=1.0, block_size=4, anchors=2),), warmup=0)
    return TrainingRun(
        path,
        base,
        RunConfig(drafter=drafter, train=training, evaluate_draft_length=4),
        TEXTS[:3],
        TEXTS[3:],
    )


def test_it_has_the_older_drafters_weights_and_a_new_head_that_says_nothing_yet(
    base: OpenModel, older: Path, tmp_path: Path
) -> None:
    began = a_run(tmp_path / "run", base, older, head=2).model
    for name, parameter in load_drafter(older, base).trainable().items():
        assert torch.equal(began.trainable()[name], parameter), name
    assert began.config.block_size == 8
    assert began.previous_token_head is not None
    assert not began.previous_token_head.up.any()


def test_deltas_that_the_new_drafter_lacks_are_left_out(
    base: OpenModel, older: Path, tmp_path: Path
) -> None:
    drafter = DrafterSpec(
        block_size=8,
        delta=DeltaConfig(rank=4, matrices=("qkv", "gate_up"), layers=(1,)),
        start=str(older),
    )
    run = begin(tmp_path / "run", base, drafter)
    names = {name for name in run.model.trainable() if name != "mask_vector"}
    assert names == {
        f"transformer.layers.1.{matrix}.{part}"
        for matrix in ("qkv", "gate_up")
        for part in ("down", "up")
    }
    for name, parameter in load_drafter(older, base).trainable().items():
        assert name not in names or torch.equal(run.model.trainable()[name], parameter), name


def test_a_higher_rank_and_fewer_layers_for_slots_begin_as_the_older_drafter_there(
    base: OpenModel, older: Path, tmp_path: Path
) -> None:
    delta = DeltaConfig(rank=6)
    drafter = DrafterSpec(
        block_size=8, delta=delta, start=str(older), anchor_slot=True, slot_layers=(1,)
    )
    began = begin(tmp_path / "run", base, drafter).model
    theirs = dict(load_drafter(older, base).transformer.layers[1].named_modules())
    layers = [
        (name, module)
        for name, module in began.transformer.layers[1].named_modules()
        if isinstance(module, Linear)
    ]
    assert len(layers) == 4
    for name, module in layers:
        old = theirs[name]
        assert isinstance(old, Linear)
        assert None not in (module.up, module.down, old.up, old.down)
        assert module.up.shape[1] == 6
        torch.testing.assert_close(module.up @ module.down, old.up @ old.down)
        assert module.down[4:].all(), "what is added can learn"


def test_the_older_checkpoint_stays_as_it_is(base: OpenModel, older: Path, tmp_path: Path) -> None:
    before = {file.name: file.read_bytes() for file in older.iterdir()}
    a_run(tmp_path / "run", base, older).run(lambda _: None)
    assert {file.name: file.read_bytes() for file in older.iterdir()} == before


@pytest.mark.parametrize(
    ("change", "message"),
    [({"rank": 3}, "its delta.rank is 4"), ({"alignment": "same"}, "its alignment is next")],
)
def test_a_drafter_of_another_kind_is_refused(
    change: dict[str, int], message: str, base: OpenModel, older: Path, tmp_path: Path
) -> None:
    with pytest.raises(InvalidCheckpoint, match=message):
        a_run(tmp_path / "run", base, older, **change)


def test_a_wider_previous_token_head_begins_as_the_older_one(
    base: OpenModel, tmp_path: Path
) -> None:
    older = random_drafter(base, previous_token_width=8)
    assert older.previous_token_head is not None
    older.previous_token_head.up.data.normal_()
    save_drafter(tmp_path / "older", older, base, storage="float32")
    old, new = (
        load_drafter(tmp_path / "older", base),
        a_run(tmp_path / "run", base, tmp_path / "older", head=16).model,
    )
    states, seen = torch.randn(5, base.config.hidden_size), torch.randint(0, 30, (5, SEEN_TOKENS))
    assert new.previous_token_head is not None
    torch.testing.assert_close(new.condition(states, seen), old.condition(states, seen))
    assert new.previous_token_head.of_tokens[8:].all(), "what is added can learn"


def test_a_narrower_previous_token_head_is_refused(base: OpenModel, tmp_path: Path) -> None:
    save_drafter(
        tmp_path / "older", random_drafter(base, previous_token_width=8), base, storage="float32"
    )
    with pytest.raises(
        InvalidCheckpoint, match="its previous_token_width is 8, the new drafter's is 4"
    ):
        a_run(tmp_path / "run", base, tmp_path / "older", head=4)


def test_a_drafter_over_other_weights_is_refused(older: Path, tmp_path: Path) -> None:
    other = open_tiny(write_tiny_target(tmp_path / "other", seed=9))
    with pytest.raises(InvalidCheckpoint, match="whose weights are not those of"):
        a_run(tmp_path / "run", other, older)
