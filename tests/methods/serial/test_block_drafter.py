"""The drafter with its cache against the same drafter recomputed from the committed text."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from d3d.engine.drafter import NO_DRAFT, Drafter
from d3d.engine.engine import Engine
from d3d.engine.request import Request
from d3d.methods.serial import denoise
from d3d.methods.serial.denoise import BlockDenoiser, reveal
from d3d.methods.serial.drafter import BlockDrafter
from d3d.model.choice import best_of
from d3d.model.drafter import DrafterModel
from d3d.model.kv_cache import SPARE_TOKENS
from d3d.model.layout import MASKED
from d3d.target.native import NativeTarget
from support.drafters import (
    block_logits,
    every_kind,
    grow,
    reference_draft,
    request,
    text,
    tiny_drafter,
)
from support.runs import make
from support.tiny import tiny_transformer

Kind = dict[str, Any]


def new_drafter(model: DrafterModel, steps: int = 1) -> BlockDrafter:
    return BlockDrafter(model, 97, num_denoise_steps=steps)


def draft(drafter: Drafter, requests: list[Request]) -> list[list[int]]:
    drafts = drafter.propose(requests)
    assert not any(made.fault for made in drafts)
    return [list(made.token_ids) for made in drafts]


@pytest.fixture
def seen_logits(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The logits of every drafting pass."""
    seen: list[Tensor] = []
    original = DrafterModel.few_logits

    def watch(
        self: DrafterModel, hidden: Tensor, target_vocab_size: int
    ) -> tuple[Tensor, Tensor | None]:
        logits, token_ids = original(self, hidden, target_vocab_size)
        seen.append(logits.clone())
        return logits, token_ids

    monkeypatch.setattr(DrafterModel, "few_logits", watch)
    return seen


# What is drafted


@every_kind
@pytest.mark.parametrize("scope", ["slots", "all", None])
def test_a_cached_draft_equals_one_recomputed_from_the_committed_text(
    kind: Kind, scope: str | None, seen_logits: list[Tensor]
) -> None:
    model = tiny_drafter(scope=scope, **kind)
    drafter = new_drafter(model)
    one = request(text(9))
    for round_id, committed in enumerate(
        (0, 1, 3, 7, 2)
    ):  # of 6 drafted tokens: a bonus token, some, all and a bonus token
        grow(one, text(committed, seed=round_id))
        (drafted,) = draft(drafter, [one])
        expected = block_logits(model, one.token_ids, [MASKED] * 6)
        assert (seen_logits[-1][0] - expected).abs().max() < 1e-5 * expected.abs().max()
        assert drafted == reference_draft(model, one.token_ids, 6)
    assert (
        len({tuple(logits.argmax(-1)[0].tolist()) for logits in seen_logits}) >= 4
    )  # not one block every time


@every_kind
@pytest.mark.parametrize("steps", [1, 3])
def test_a_batch_drafts_what_each_text_drafts_alone(kind: Kind, steps: int) -> None:
    model = tiny_drafter(**kind)
    drafter = new_drafter(model, steps)
    batch = [request(text(length, seed=length)) for length in (12, 1, 5)]
    for round_id, committed in enumerate([(0, 0, 0), (7, 1, 3), (1, 7, 2)]):
        for one, count in zip(batch, committed, strict=True):
            grow(one, text(count, seed=10 + round_id))
        expected = [reference_draft(model, one.token_ids, 6, steps) for one in batch]
        assert draft(drafter, batch) == expected
        assert [draft(new_drafter(model, steps), [one])[0] for one in batch] == expected


@every_kind
def test_requests_that_stay_draft_on(kind: Kind) -> None:
    model = tiny_drafter(**kind)
    drafter = new_drafter(model)
    batch = [request(text(length, seed=length)) for length in (4, 9, 6)]
    draft(drafter, batch)
    drafter.end(batch[0])
    staying = [batch[2], batch[1]]
    for one in staying:
        grow(one, text(3, seed=len(one)))
    assert draft(drafter, staying) == [reference_draft(model, one.token_ids, 6) for one in staying]
    assert drafter.num_held == 2


@every_kind
@pytest.mark.parametrize("steps", [1, 3])
def test_bystanders_between_are_left_alone_and_draft_on_later(kind: Kind, steps: int) -> None:
    """Requests come, go, and miss rounds: each draft is what its text gives alone."""
    model = tiny_drafter(**kind)
    drafter = new_drafter(model, steps)
    batch = [request(text(length, seed=length)) for length in (4, 30, 6, 1)]
    draft(drafter, batch)
    rounds = ((0, 3), (3, 1), (0, 2), (2,), (1, 4, 3), (0, 4), (0, 1, 2, 3, 4))
    for round_id, asked in enumerate(rounds):
        if round_id == 4:
            batch.append(request(text(17, seed=2)))
        for place, one in enumerate(batch):
            grow(one, text(1 + (round_id + place) % 7, seed=round_id))
        some = [batch[place] for place in asked]
        assert draft(drafter, some) == [
            reference_draft(model, one.token_ids, 6, steps) for one in some
        ]


@pytest.mark.parametrize("alignment", ["next", "same"])
def test_a_shorter_causal_draft_is_the_beginning_of_a_longer_one(alignment: str) -> None:
    model = tiny_drafter(alignment=alignment)
    one = request(text(8))
    (longest,) = draft(new_drafter(model), [one])
    for length in range(1, 7):
        shorter = BlockDrafter(model, 97, draft_length=length)
        assert shorter.max_draft_length == length
        assert draft(shorter, [one])[0] == longest[:length]
        assert draft(new_drafter(model), [request(text(8), room=length)])[0] == longest[:length]
    assert BlockDrafter(model, 97, draft_length=99).max_draft_length == 6


@every_kind
def test_each_request_gets_as_many_tokens_as_there_is_room_for(kind: Kind) -> None:
    model = tiny_drafter(**kind)
    drafter = new_drafter(model)
    batch = [request(text(5, seed=i), room) for i, room in enumerate((2, 0, 99, 6))]
    assert [len(tokens) for tokens in draft(drafter, batch)] == [2, 0, 6, 6]
    assert draft(drafter, [request(text(5), 0)] * 4) == [[], [], [], []]
    cache = model.transformer.new_cache()
    for sequence_id in range(4):
        cache.open(sequence_id)
    texts = [text(5, seed=i) for i in range(4)]
    denoiser = BlockDenoiser(model, 97, cache)
    drafts = denoiser.draft([3, 2, 1, 0], texts, [2, 0, 99, -1])
    assert [len(made.token_ids) for made in drafts] == [2, 0, 6, 0]
    assert denoiser.draft([0, 1], texts[:2], [0, -1]) == [NO_DRAFT] * 2


# The cache


@every_kind
@pytest.mark.parametrize("steps", [1, 3])
def test_no_slot_stays_in_the_cache(kind: Kind, steps: int) -> None:
    """What is cached is what the clean text alone gives, to the bit where the deltas act at slots
    only."""
    model = tiny_drafter(**kind)
    drafter = new_drafter(model, steps)
    batch = [request(text(7)), request(text(3, seed=1))]
    for committed in (0, 4, 7):
        for one in batch:
            grow(one, text(committed, seed=committed))
        draft(drafter, batch)
        cache = drafter._cache
        assert cache.ids == [one.id for one in batch]
        for one in batch:
            length = len(one) - model.config.anchor_slot
            assert cache.length(one.id) == length
            assert drafter.num_missing(one) == model.config.anchor_slot
            fresh = model.transformer.new_cache()
            fresh.open(0, length)
            ids = torch.tensor([one.token_ids[:length]])
            mask = torch.ones(length, length).tril().bool()[None]
            positions = torch.arange(length)[None]
            model.transformer.hidden(model.embed(ids), positions, mask, fresh.window([0]))
            for layer in range(2):
                pairs = zip(
                    cache.window([one.id]).read(layer, length),
                    fresh.window([0]).read(layer, length),
                    strict=True,
                )
                for cached, clean in pairs:
                    torch.testing.assert_close(cached, clean, atol=1e-5, rtol=1e-5)


def test_after_a_rejection_a_drafter_that_is_the_target_is_right_again() -> None:
    """The anchor's row is the target's own next token, so of one-token drafts none may fail,
    whatever was rejected before."""
    target = tiny_transformer(seed=1)
    drafter = new_drafter(tiny_drafter(target))
    one = request(text(6))

    def targets_choice() -> int:
        (logits,) = NativeTarget(target).forward([0], [one.token_ids], last_only=True)
        return logits.argmax()[0]

    for round_id in range(20):
        (drafted,) = draft(drafter, [one])
        assert drafted[0] == targets_choice(), f"round {round_id}"
        kept = (
            round_id % 5
        )  # commit some of the draft and then something else: a rejection at every place
        grow(one, [*drafted[:kept], (drafted[kept] + 1) % 90])


@every_kind
@pytest.mark.parametrize("rows", [1, 3, 8])
def test_catching_up_in_chunks_changes_nothing(
    kind: Kind, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_drafter(scope="all", **kind)
    lengths = (40, 1, 17)
    expected = draft(new_drafter(model), [request(text(n, seed=n)) for n in lengths])
    monkeypatch.setattr(denoise, "CATCH_UP_ROWS", rows)
    drafter = new_drafter(model)
    batch = [request(text(n, seed=n)) for n in lengths]
    assert draft(drafter, batch) == expected
    for one in batch:
        grow(one, text(7, seed=len(one)))
    assert draft(drafter, batch) == [reference_draft(model, one.token_ids, 6) for one in batch]


def test_drafting_twice_from_the_same_text_gives_the_same_block() -> None:
    drafter = new_drafter(tiny_drafter())
    one = request(text(6))
    assert draft(drafter, [one]) == draft(drafter, [one])


def test_caches_have_room_for_what_is_written_not_for_what_may_be() -> None:
    target = NativeTarget(tiny_transformer())
    drafter = BlockDrafter(tiny_drafter(target.model), target.vocab_size)
    engine = Engine(target, drafter)
    engine.add(make(target, text(9), max_tokens=400).request)
    for _ in range(5):
        engine.step()
    room = [cache.capacity for cache in (target.cache, drafter._cache)]
    assert room == [9 + SPARE_TOKENS, 10 + SPARE_TOKENS]


def test_two_drafters_of_one_model_do_not_meet() -> None:
    model = tiny_drafter()
    first, second = new_drafter(model), new_drafter(model)
    one, other = request(text(9)), request(text(4, seed=5))
    draft(first, [one])
    assert draft(second, [other])[0] == reference_draft(model, other.token_ids, 6)
    assert draft(first, [one])[0] == reference_draft(model, one.token_ids, 6)


def test_a_request_that_ends_is_forgotten() -> None:
    drafter = BlockDrafter(tiny_drafter(), 97, lookup=2, least_kept=0.5)
    one, other = request(text(9)), request(text(4, seed=5))
    draft(drafter, [one, other])
    assert drafter.num_held == 6, "a row of the cache, a past and a history each"
    assert drafter.num_missing(one) == 0
    drafter.end(one)
    drafter.end(one)
    assert drafter.num_missing(one) == 9
    assert drafter.num_held == 3
    drafter.end(other)
    assert drafter.num_held == drafter._cache.keys.numel() == 0


# Denoising


@every_kind
@pytest.mark.parametrize("steps", [1, 2, 3, 6, 9])
def test_denoising_fills_the_most_confident_places_first(kind: Kind, steps: int) -> None:
    model = tiny_drafter(**kind)
    for seed in range(3):
        one = request(text(7, seed=seed))
        assert draft(new_drafter(model, steps), [one])[0] == reference_draft(
            model, one.token_ids, 6, steps
        )


@pytest.mark.parametrize(
    ("length", "steps", "filled"),
    [(6, 1, [6]), (6, 2, [3, 6]), (6, 3, [2, 4, 6]), (5, 3, [2, 4, 5]), (1, 3, [1, 1, 1])],
)
def test_every_step_fills_its_share_and_leaves_the_rest_alone(
    length: int, steps: int, filled: list[int]
) -> None:
    generator = torch.Generator().manual_seed(0)
    blocks = torch.full((3, length), MASKED)
    for step, count in enumerate(filled):
        chosen = best_of(torch.randn(3, length, 97, generator=generator), None, logprobs=True)
        new = reveal(blocks, chosen, remaining_steps=steps - step)
        assert (new != MASKED).sum(1).tolist() == [count] * 3
        assert torch.equal(new[blocks != MASKED], blocks[blocks != MASKED])
        blocks = new


# What must never be drafted


@every_kind
@pytest.mark.parametrize("steps", [1, 2])
def test_neither_the_mask_token_nor_ids_beyond_the_target_are_drafted(
    kind: Kind, steps: int
) -> None:
    """A head that wants nothing else: mask token first, then what the target does not know, then
    token 13."""
    base = tiny_transformer(seed=1, tie_word_embeddings=False)
    model = tiny_drafter(base, mask_token_id=40, **kind)
    direction = torch.zeros(64)
    direction[0] = 1e4
    base.norm.weight.data[:] = 0
    base.norm.weight.data[0] = 1
    base.head.weight.data[:] = 0
    for token_id, size in ((40, 3), (80, 2), (13, 1)):
        base.head.weight.data[token_id] = direction * size
        base.head.weight.data[token_id + 1] = (
            -direction * size
        )  # whichever sign the hidden state has
    drafter = BlockDrafter(model, target_vocab_size=80, num_denoise_steps=steps)
    for seed in range(3):
        (drafted,) = draft(drafter, [request(text(6, seed=seed))])
        assert len(drafted) == 6
        assert set(drafted) <= {13, 14, 41}


def test_a_mask_token_stands_for_open_places_and_has_no_learned_vector() -> None:
    model = tiny_drafter(mask_token_id=96)
    assert model.mask_vector is None
    masked = model.embed(torch.tensor([[3, MASKED]]))
    assert torch.equal(masked, model.transformer.embed(torch.tensor([[3, 96]])))


def test_weights_that_are_not_finite_are_a_fault_and_no_draft() -> None:
    target = tiny_transformer(seed=1)
    target.layers[1].out.weight.data[0] = float("nan")
    (made,) = new_drafter(tiny_drafter(target)).propose([request(text(5))])
    assert made.token_ids == ()
    assert made.fault is not None
    assert "not finite" in made.fault


def test_a_text_with_ids_that_the_drafter_does_not_know_is_a_fault_and_no_crash() -> None:
    model = tiny_drafter(tiny_transformer(seed=1, vocab_size=50))
    drafter = new_drafter(model)
    one = request([1, 2, 3])
    assert max(draft(drafter, [one])[0]) < 50
    grow(one, [60])
    (made,) = drafter.propose([one])
    assert made.token_ids == ()
    assert made.fault is not None
    assert "ids below 50" in made.fault


def test_a_text_that_the_drafter_can_not_read_leaves_its_mates_alone() -> None:
    model = tiny_drafter(tiny_transformer(seed=1, vocab_size=50))
    strange, plain = new_drafter(model).propose([request([1, 2, 60]), request([1, 2, 3])])
    assert strange.fault is not None
    assert [plain] == new_drafter(model).propose([request([1, 2, 3])])


# The drafter's context


@every_kind
def test_a_text_beyond_the_drafters_context_gets_no_draft_and_its_mates_get_theirs(
    kind: Kind,
) -> None:
    model = tiny_drafter(tiny_transformer(seed=1, max_position_embeddings=16), **kind)
    drafter = new_drafter(model)
    long, short = request(text(5)), request(text(2, seed=3))
    for round_id in range(12):
        long_block, short_block = draft(drafter, [long, short])
        assert len(long_block) == max(0, min(6, 16 - len(long)))
        assert len(short_block) == max(0, min(6, 16 - len(short)))
        if len(short) <= 10 and (
            len(long) <= 10 or kind["block_attention"] == "causal" or len(long) >= 16
        ):
            assert short_block == reference_draft(model, short.token_ids, 6)
        assert max(drafter._cache.lengths) <= 16
        grow(long, text(7 if round_id % 2 else 1, seed=round_id))
        grow(short, text(1, seed=round_id))
    assert len(long) > 50


def test_a_prompt_longer_than_the_drafters_context_is_no_crash() -> None:
    model = tiny_drafter(tiny_transformer(seed=1, max_position_embeddings=16))
    assert draft(new_drafter(model), [request(text(40))]) == [[]]


@every_kind
def test_a_bystander_that_fills_the_drafters_context_is_no_crash(kind: Kind) -> None:
    model = tiny_drafter(tiny_transformer(seed=1, max_position_embeddings=16), **kind)
    drafter = new_drafter(model)
    batch = [request(text(3)), request(text(40, seed=1)), request(text(4, seed=2))]
    draft(drafter, batch)
    assert max(drafter._cache.lengths) > 14
    others = [batch[0], batch[2]]
    for one in others:
        grow(one, [7])
    assert draft(drafter, others) == [reference_draft(model, one.token_ids, 6) for one in others]
