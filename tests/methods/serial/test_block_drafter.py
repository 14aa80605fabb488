"""The drafter through its cache against the same drafter recomputed from the committed text
alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from d3d.methods.serial.denoise import reveal
from d3d.methods.serial.drafter import BlockDrafter
from d3d.model.choice import best_of
from d3d.model.drafter import DrafterModel
from d3d.model.layout import MASKED
from support.drafters import block_logits, every_kind, reference_draft, text, tiny_drafter
from support.tiny import tiny_transformer

Kind = dict[str, Any]


def open_session(
    model: DrafterModel, batch: int = 1, steps: int = 1, capacity: int = 100
) -> BlockDraftSession:
    return BlockDrafter(model, target_vocab_size=97, num_denoise_steps=steps).open(batch, capacity)


def draft(session: BlockDraftSession, sequences: list[Sequence], *lengths: int) -> list[list[int]]:
    blocks = session.draft(sequences, lengths)
    assert not any(block.fault for block in blocks)
    return [list(block.token_ids) for block in blocks]


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
    session = open_session(model)
    one = sequence(text(9))
    for round_id, committed in enumerate(
        (0, 1, 3, 7, 2)
    ):  # of 6 drafted tokens: a bonus token, some, all and a bonus token
        one.commit(text(committed, seed=round_id))
        drafted = draft(session, [one], 6)[0]
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
    session = open_session(model, batch=3, steps=steps)
    batch = [sequence(text(length, seed=length)) for length in (12, 1, 5)]
    for round_id, committed in enumerate([(0, 0, 0), (7, 1, 3), (1, 7, 2)]):
        for one, count in zip(batch, committed, strict=True):
            one.commit(text(count, seed=10 + round_id))
        expected = [reference_draft(model, one.token_ids, 6, steps) for one in batch]
        assert draft(session, batch, 6, 6, 6) == expected
        assert [draft(open_session(model, steps=steps), [one], 6)[0] for one in batch] == expected


@every_kind
def test_sequences_that_are_kept_draft_on(kind: Kind) -> None:
    model = tiny_drafter(**kind)
    session = open_session(model, batch=3)
    batch = [sequence(text(length, seed=length)) for length in (4, 9, 6)]
    draft(session, batch, 6, 6, 6)
    session.keep([2, 1])
    batch = [batch[2], batch[1]]
    for one in batch:
        one.commit(text(3, seed=len(one)))
    assert draft(session, batch, 6, 6) == [
        reference_draft(model, one.token_ids, 6) for one in batch
    ]


@pytest.mark.parametrize("alignment", ["next", "same"])
def test_a_shorter_causal_draft_is_the_beginning_of_a_longer_one(alignment: str) -> None:
    model = tiny_drafter(alignment=alignment)
    one = sequence(text(8))
    longest = draft(open_session(model), [one], 6)[0]
    for length in range(1, 7):
        assert draft(open_session(model), [one], length)[0] == longest[:length]


@every_kind
def test_each_sequence_gets_as_many_tokens_as_were_asked_for_it(kind: Kind) -> None:
    session = open_session(tiny_drafter(**kind), batch=4)
    batch = [sequence(text(5, seed=i)) for i in range(4)]
    assert [len(block) for block in draft(session, batch, 2, 0, 99, -1)] == [2, 0, 6, 0]
    assert draft(session, batch, 0, 0, 0, 0) == [[], [], [], []]


# The cache


@every_kind
@pytest.mark.parametrize("steps", [1, 3])
def test_no_slot_stays_in_the_cache(kind: Kind, steps: int) -> None:
    """What is cached is what the clean text alone gives, to the bit where the deltas act at slots
    only."""
    model = tiny_drafter(**kind)
    session = open_session(model, batch=2, steps=steps)
    batch = [sequence(text(7)), sequence(text(3, seed=1))]
    for committed in (0, 4, 7):
        for one in batch:
            one.commit(text(committed, seed=committed))
        draft(session, batch, 6, 6)
        lengths = [len(one) - model.config.anchor_slot for one in batch]
        assert session.lengths == lengths
        for i, (one, length) in enumerate(zip(batch, lengths, strict=True)):
            fresh = model.transformer.new_cache(1, length)
            ids = torch.tensor([one.token_ids[:length]])
            mask = torch.ones(length, length).tril().bool()[None]
            model.transformer.hidden(model.embed(ids), torch.arange(length)[None], mask, fresh)
            for layer in range(2):
                for cached, clean in zip(
                    session._cache.read(layer, length), fresh.read(layer, length), strict=True
                ):
                    torch.testing.assert_close(cached[i], clean[0], atol=1e-5, rtol=1e-5)


def test_after_a_rejection_a_drafter_that_is_the_target_is_right_again() -> None:
    """The anchor's row is the target's own next token, so of one-token drafts none may fail,
    whatever was rejected before."""
    target = tiny_transformer(seed=1)
    session = open_session(tiny_drafter(target))
    one = sequence(text(6))
    cache = target.new_cache(1, 100)

    def targets_choice() -> int:
        missing = torch.tensor([one.token_ids[cache.lengths[0] :]])
        start, rows = cache.lengths[0], missing.shape[1]
        mask = torch.arange(start + rows) <= (start + torch.arange(rows))[:, None]
        hidden = target.hidden(
            target.embed(missing), start + torch.arange(rows)[None], mask[None], cache
        )
        cache.advance([rows])
        return int(target.logits(hidden[0, -1]).argmax())

    for round_id in range(20):
        drafted = draft(session, [one], 6)[0]
        assert drafted[0] == targets_choice(), f"round {round_id}"
        kept = (
            round_id % 5
        )  # commit some of the draft and then something else: a rejection at every place
        one.commit([*drafted[:kept], (drafted[kept] + 1) % 90])


@every_kind
@pytest.mark.parametrize("rows", [1, 3, 8])
def test_catching_up_in_chunks_changes_nothing(
    kind: Kind, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_drafter(scope="all", **kind)
    lengths = (40, 1, 17)
    expected = draft(
        open_session(model, batch=3), [sequence(text(n, seed=n)) for n in lengths], 6, 6, 6
    )
    monkeypatch.setattr(block_drafter, "CATCH_UP_ROWS", rows)
    session = open_session(model, batch=3)
    batch = [sequence(text(n, seed=n)) for n in lengths]
    assert draft(session, batch, 6, 6, 6) == expected
    for one in batch:
        one.commit(text(7, seed=len(one)))
    assert draft(session, batch, 6, 6, 6) == [
        reference_draft(model, one.token_ids, 6) for one in batch
    ]


def test_drafting_twice_from_the_same_text_gives_the_same_block() -> None:
    session = open_session(tiny_drafter())
    one = sequence(text(6))
    assert draft(session, [one], 6) == draft(session, [one], 6)


def test_two_sessions_of_one_drafter_do_not_meet() -> None:
    drafter = BlockDrafter(tiny_drafter(), 97)
    first, second = drafter.open(1, 50), drafter.open(1, 50)
    one, other = sequence(text(9)), sequence(text(4, seed=5))
    draft(first, [one], 6)
    assert draft(second, [other], 6)[0] == reference_draft(drafter.model, other.token_ids, 6)
    assert draft(first, [one], 6)[0] == reference_draft(drafter.model, one.token_ids, 6)


# Denoising


@every_kind
@pytest.mark.parametrize("steps", [1, 2, 3, 6, 9])
def test_denoising_fills_the_most_confident_places_first(kind: Kind, steps: int) -> None:
    model = tiny_drafter(**kind)
    for seed in range(3):
        one = sequence(text(7, seed=seed))
        assert draft(open_session(model, steps=steps), [one], 6)[0] == reference_draft(
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
        drafted = drafter.open(1, 50).draft([sequence(text(6, seed=seed))], [6])[0].token_ids
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
    block = open_session(tiny_drafter(target)).draft([sequence(text(5))], [6])[0]
    assert block.token_ids == ()
    assert block.fault is not None
    assert "not finite" in block.fault


def test_a_text_with_ids_that_the_drafter_does_not_know_is_a_fault_and_no_crash() -> None:
    model = tiny_drafter(tiny_transformer(seed=1, vocab_size=50))
    session = BlockDrafter(model, target_vocab_size=97).open(1, 50)
    one = sequence([1, 2, 3])
    assert max(session.draft([one], [6])[0].token_ids) < 50
    one.commit([60])
    block = session.draft([one], [6])[0]
    assert block.token_ids == ()
    assert block.fault is not None
    assert "ids below 50" in block.fault


def test_a_text_that_the_drafter_can_not_read_leaves_its_mates_alone() -> None:
    model = tiny_drafter(tiny_transformer(seed=1, vocab_size=50))
    session = BlockDrafter(model, target_vocab_size=97).open(2, 50)
    strange, plain = session.draft([sequence([1, 2, 60]), sequence([1, 2, 3])], [6, 6])
    assert strange.fault is not None
    assert (
        plain
        == BlockDrafter(model, target_vocab_size=97)
        .open(1, 50)
        .draft([sequence([1, 2, 3])], [6])[0]
    )


# The drafter's context


@every_kind
def test_a_text_beyond_the_drafters_context_gets_no_draft_and_its_mates_get_theirs(
    kind: Kind,
) -> None:
    model = tiny_drafter(tiny_transformer(seed=1, max_position_embeddings=16), **kind)
    session = open_session(model, batch=2, capacity=64)
    long, short = sequence(text(5)), sequence(text(2, seed=3))
    for round_id in range(12):
        long_block, short_block = draft(session, [long, short], 6, 6)
        assert len(long_block) == max(0, min(6, 16 - len(long)))
        assert len(short_block) == max(0, min(6, 16 - len(short)))
        if len(short) <= 10 and (
            len(long) <= 10 or kind["block_attention"] == "causal" or len(long) >= 16
        ):
            assert short_block == reference_draft(model, short.token_ids, 6)
        assert max(session.lengths) <= 16
        long.commit(text(7 if round_id % 2 else 1, seed=round_id))
        short.commit(text(1, seed=round_id))
    assert len(long) > 50


def test_a_prompt_longer_than_the_drafters_context_is_no_crash() -> None:
    model = tiny_drafter(tiny_transformer(seed=1, max_position_embeddings=16))
    assert draft(open_session(model, capacity=64), [sequence(text(40))], 6) == [[]]
