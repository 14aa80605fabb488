"""The previous-token head: each slot is conditioned on the token drafted before it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from d3d.hub.checkpoint import save_drafter
from d3d.hub.open_drafter import load_drafter
from d3d.methods.serial.drafter import BlockDrafter
from d3d.model.drafter import DeltaConfig, DrafterConfig, DrafterModel
from d3d.model.from_target import from_target
from d3d.model.linear import pack_weights
from support.drafters import request
from support.tiny import tiny_transformer
from support.tiny_model import open_tiny

TEXT = [3, 14, 15, 9, 26]
VOCAB = 97


def drafter(
    alignment: str = "next", *, strength: float = 1.0, width: int | None = 4
) -> DrafterModel:
    config = DrafterConfig(
        block_size=5,
        alignment=alignment,
        kept_layers=(0, 1),
        delta=DeltaConfig(rank=2),
        previous_token_width=width,
    )
    model = from_target(tiny_transformer(), config, seed=1)
    if model.previous_token_head is not None:
        torch.nn.init.normal_(
            model.previous_token_head.up, std=strength, generator=torch.Generator().manual_seed(5)
        )
    return model.eval()


def draft(
    model: DrafterModel, texts: list[list[int]] | None = None, steps: int = 1
) -> list[tuple[int, ...]]:
    texts = texts or [TEXT]
    drafter = BlockDrafter(model, VOCAB, num_denoise_steps=steps)
    return [made.token_ids for made in drafter.propose([request(ids) for ids in texts])]


@pytest.mark.parametrize("alignment", ["next", "same"])
@pytest.mark.parametrize("candidates", [1, 7, 64])
def test_each_token_is_the_best_of_a_slots_candidates_given_the_two_before(
    alignment: str, candidates: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("d3d.model.drafter.CANDIDATES", candidates)
    model = drafter(alignment)
    head = model.previous_token_head
    assert head is not None
    states, logits = (
        torch.randn(1, 5, 64, generator=torch.Generator().manual_seed(1)),
        torch.zeros(1, 5, VOCAB),
    )
    size = model.transformer.config.hidden_size
    states = states[..., :size]
    logits.copy_(model.transformer.logits(states))
    expected, seen = [], [TEXT[-1], TEXT[-2]]
    for place in range(5):
        scores = logits[0, place].clone()
        if place or alignment == "same":
            normed = F.rms_norm(states[0, place], (size,))
            tokens = F.rms_norm(model.transformer.embedding[seen], (size,)).flatten()
            told = states[0, place] + head.up @ F.silu(
                head.of_state @ normed + head.of_tokens @ tokens
            )
            best = scores.topk(candidates).indices
            scores[:] = float("-inf")
            scores[best] = model.transformer.head.weight[best] @ told
        expected.append(int(scores.argmax()))
        seen = [expected[-1], seen[0]]
    model.choose_in_turn(
        states, logits, torch.tensor([[TEXT[-1], TEXT[-2]]]), own_rows=model.config.own_rows
    )
    assert logits.argmax(-1)[0].tolist() == expected


def test_it_changes_what_is_drafted() -> None:
    assert draft(drafter()) != draft(drafter(strength=0.0))


def test_a_mask_token_is_never_chosen() -> None:
    config = DrafterConfig(
        block_size=5,
        kept_layers=(0, 1),
        delta=DeltaConfig(rank=2),
        previous_token_width=4,
        mask_token_id=7,
    )
    model = from_target(tiny_transformer(vocab_size=50), config, seed=1)
    assert model.previous_token_head is not None
    torch.nn.init.normal_(model.previous_token_head.up, generator=torch.Generator().manual_seed(5))
    for seed in range(30):
        ids = torch.randint(0, 50, (4,), generator=torch.Generator().manual_seed(seed)).tolist()
        (made,) = BlockDrafter(model.eval(), 50).propose([request(ids)])
        assert len(made.token_ids) == 5
        assert 7 not in made.token_ids[1:]


def test_packed_weights_change_nothing() -> None:
    model, packed = drafter(), drafter()
    pack_weights(packed)
    assert packed.transformer.head.weight.is_mkldnn
    assert draft(packed) == draft(model)


def test_a_fresh_head_says_nothing() -> None:
    assert draft(drafter(strength=0.0)) == draft(drafter(width=None))


@pytest.mark.parametrize("steps", [1, 2])
def test_a_batch_drafts_what_each_would_alone(steps: int) -> None:
    model = drafter()
    texts = [TEXT, TEXT[:2], [*TEXT, 7, 8]]
    assert draft(model, texts, steps) == [draft(model, [ids], steps)[0] for ids in texts]


def test_it_travels_in_the_checkpoint(tiny_target: Path, tmp_path: Path) -> None:
    base = open_tiny(tiny_target)
    config = DrafterConfig(
        block_size=5, kept_layers=(0, 1), delta=DeltaConfig(rank=2), previous_token_width=3
    )
    model = from_target(base.transformer, config)
    assert model.previous_token_head is not None
    torch.nn.init.normal_(model.previous_token_head.up)
    save_drafter(tmp_path / "drafter", model, base, storage="float32")
    loaded = load_drafter(tmp_path / "drafter", base)
    assert loaded.previous_token_head is not None
    for name, parameter in model.previous_token_head.named_parameters():
        assert torch.equal(loaded.previous_token_head.get_parameter(name), parameter), name
