"""The previous-token head: each slot is told which token was drafted before it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from d3d.core.sequence import Sequence
from d3d.core.types import SamplingParams
from d3d.drafting.block_drafter import BlockDrafter
from d3d.models.checkpoint import load_drafter, save_drafter
from d3d.models.drafter import DeltaConfig, DrafterConfig, DrafterModel
from d3d.models.from_target import from_target
from d3d.models.tiny import tiny_transformer
from support.tiny_model import open_tiny

TEXT = [3, 14, 15, 9, 26]
VOCAB = 97


def drafter(alignment: str = "next", *, strength: float = 1.0, rank: int | None = 4) -> DrafterModel:
    config = DrafterConfig(block_size=5, alignment=alignment, kept_layers=(0, 1), delta=DeltaConfig(rank=2), previous_token_rank=rank)
    model = from_target(tiny_transformer(), config, seed=1)
    if model.previous_token_head is not None:
        torch.nn.init.normal_(model.previous_token_head.head, std=strength, generator=torch.Generator().manual_seed(5))
    return model.eval()


def draft(model: DrafterModel, texts: list[list[int]] | None = None, steps: int = 1) -> list[tuple[int, ...]]:
    texts = texts or [TEXT]
    session = BlockDrafter(model, VOCAB, steps).open(len(texts), 64)
    return [block.token_ids for block in session.draft([Sequence(ids, SamplingParams()) for ids in texts], [5] * len(texts))]


@pytest.mark.parametrize("alignment", ["next", "same"])
def test_each_token_is_chosen_given_the_one_before(alignment: str) -> None:
    model, without = drafter(alignment), drafter(alignment, strength=0.0)
    logits = torch.zeros(1, 5, VOCAB)
    seen = []

    def remember(values: torch.Tensor, *_: object) -> None:
        logits.copy_(values)

    plain_choose = without.choose_in_turn
    without.choose_in_turn = remember  # type: ignore[method-assign]
    draft(without)
    without.choose_in_turn = plain_choose  # type: ignore[method-assign]
    head = model.previous_token_head
    assert head is not None
    previous = TEXT[-1]
    for place in range(5):
        row = logits[0, place].clone()
        if place or alignment == "same":
            row += head.head @ head.embedding[previous]
        previous = int(row.argmax())
        seen.append(previous)
    assert draft(model) == [tuple(seen)]
    assert draft(model) != draft(without)


def test_a_fresh_head_says_nothing() -> None:
    assert draft(drafter(strength=0.0)) == draft(drafter(rank=None))


@pytest.mark.parametrize("steps", [1, 2])
def test_a_batch_drafts_what_each_would_alone(steps: int) -> None:
    model = drafter()
    texts = [TEXT, TEXT[:2], [*TEXT, 7, 8]]
    assert draft(model, texts, steps) == [draft(model, [ids], steps)[0] for ids in texts]


def test_it_travels_in_the_checkpoint(tiny_target: Path, tmp_path: Path) -> None:
    base = open_tiny(tiny_target)
    config = DrafterConfig(block_size=5, kept_layers=(0, 1), delta=DeltaConfig(rank=2), previous_token_rank=3)
    model = from_target(base.transformer, config)
    assert model.previous_token_head is not None
    torch.nn.init.normal_(model.previous_token_head.head)
    save_drafter(tmp_path / "drafter", model, base, storage="float32")
    loaded = load_drafter(tmp_path / "drafter", base)
    assert loaded.previous_token_head is not None
    assert torch.equal(loaded.previous_token_head.head, model.previous_token_head.head)
    assert torch.equal(loaded.previous_token_head.embedding, model.previous_token_head.embedding)
