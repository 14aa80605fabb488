"""A causal drafter proposes its own greedy continuation, with a cache that forgets what was not
kept."""

from __future__ import annotations

from pathlib import Path

import pytest

from d3d.errors import InvalidCheckpoint, InvalidRequest
from d3d.methods.draft_model.drafter import DraftModelDrafter, autoregressive_head
from d3d.model.transformer import Transformer
from d3d.target.native import NativeTarget
from support.drafters import text, tiny_drafter
from support.runs import PROMPT, make, run, run_all
from support.tiny import tiny_transformer
from support.tiny_model import open_tiny, write_tiny_target


def continuation(model: Transformer, token_ids: list[int], length: int) -> list[int]:
    return run(NativeTarget(model), prompt=token_ids, max_tokens=length).ids


@pytest.fixture(scope="module")
def small() -> Transformer:
    return tiny_transformer(seed=3)


def test_a_draft_is_the_models_own_greedy_continuation(small: Transformer) -> None:
    session = DraftModelDrafter(small, 97).open(2, 200)
    texts = [text(30, 1), text(7, 2)]
    blocks = session.draft([sequence(ids) for ids in texts], [5, 3])
    assert [list(block.token_ids) for block in blocks] == [
        continuation(small, ids, n) for ids, n in zip(texts, (5, 3), strict=True)
    ]


@pytest.mark.parametrize("kept", [0, 1, 3, 4])
def test_what_was_not_kept_is_forgotten(small: Transformer, kept: int) -> None:
    session = DraftModelDrafter(small, 97).open(1, 200)
    sentence = sequence(text(12))
    (block,) = session.draft([sentence], [4])
    sentence.commit([*block.token_ids[:kept], 55])
    (block,) = session.draft([sentence], [4])
    assert list(block.token_ids) == continuation(small, sentence.token_ids, 4)


def test_rows_leave_and_some_have_nothing_to_draft(small: Transformer) -> None:
    session = DraftModelDrafter(small, 97).open(3, 200)
    sentences = [sequence(text(10, seed)) for seed in range(3)]
    blocks = session.draft(sentences, [2, 0, 4])
    assert [len(block.token_ids) for block in blocks] == [2, 0, 4]
    session.keep([2, 1])
    rest = [sentences[2], sentences[1]]
    for sentence in rest:
        sentence.commit([8, 9])
    blocks = session.draft(rest, [3, 3])
    assert [list(block.token_ids) for block in blocks] == [
        continuation(small, sentence.token_ids, 3) for sentence in rest
    ]
    assert all(block.token_ids == () for block in session.draft(rest, [0, 0]))


def test_answers_are_the_plain_ones(small: Transformer) -> None:
    engine = NativeTarget(tiny_transformer(seed=0))
    plain = run(engine, max_tokens=30)
    assert run(engine, DraftModelDrafter(small, 97), draft_length=4, max_tokens=30).ids == plain.ids
    batch = run_all(
        engine,
        DraftModelDrafter(small, 97),
        [make(engine, PROMPT, max_tokens=n) for n in (3, 30, 12)],
        4,
    )
    assert [one.ids for one in batch] == [plain.ids[:n] for n in (3, 30, 12)]


def test_the_target_as_its_own_drafter_is_always_right() -> None:
    engine = NativeTarget(tiny_transformer(seed=0))
    rounds = run(engine, DraftModelDrafter(engine.model, 97), draft_length=4, max_tokens=26).rounds
    assert [(stats.draft_length, stats.num_accepted) for stats in rounds] == [(4, 4)] * 5


def test_a_text_that_the_drafter_does_not_know_gets_a_fault_and_a_long_one_no_draft() -> None:
    session = DraftModelDrafter(tiny_transformer(vocab_size=50), 97).open(2, 200)
    blocks = session.draft([sequence([1, 60, 2]), sequence([1, 2, 3])], [4, 4])
    assert "does not know" in (blocks[0].fault or "")
    assert len(blocks[1].token_ids) == 4
    short = DraftModelDrafter(tiny_transformer(max_position_embeddings=16), 97).open(1, 200)
    assert [
        len(short.draft([sequence(text(length))], [6])[0].token_ids) for length in (12, 16, 20)
    ] == [4, 0, 0]


def test_ids_beyond_the_targets_vocabulary_are_never_proposed() -> None:
    session = DraftModelDrafter(tiny_transformer(), 20).open(1, 200)
    (block,) = session.draft([sequence(text(9))], [8])
    assert len(block.token_ids) == 8
    assert max(block.token_ids) < 20


def test_another_tokenizer_is_refused(tiny_target: Path, tmp_path: Path) -> None:
    target = open_tiny(tiny_target)
    assert draft_model(open_tiny(tiny_target), target).target_vocab_size == target.config.vocab_size
    other = open_tiny(write_tiny_target(tmp_path / "other", texts=["zigzag zebra zoo"] * 9))
    with pytest.raises(InvalidCheckpoint, match="the tokenizers differ"):
        draft_model(other, target)


def test_a_block_drafters_clean_rows_draft_too() -> None:
    drafter = tiny_drafter()
    head = autoregressive_head(drafter, 97)
    (block,) = head.open(1, 100).draft([sequence(text(9))], [4])
    assert list(block.token_ids) == continuation(drafter.transformer, text(9), 4)
    with pytest.raises(InvalidRequest, match="clean rows"):
        autoregressive_head(tiny_drafter(scope="all"), 97)
