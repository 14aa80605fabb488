"""A causal drafter proposes its own greedy continuation, and its cache drops rejected tokens."""

from __future__ import annotations

from pathlib import Path

import pytest

from d3d.engine.drafter import Drafter
from d3d.engine.request import Request
from d3d.errors import InvalidCheckpoint, InvalidRequest
from d3d.methods.base import Parts
from d3d.methods.draft_model.config import DraftModelConfig
from d3d.methods.draft_model.drafter import DraftModelDrafter, autoregressive_head
from d3d.methods.serial.denoise import not_finite
from d3d.model.transformer import Transformer
from d3d.target.native import NativeTarget
from support.drafters import grow, request, text, tiny_drafter
from support.runs import PROMPT, make, run, run_all
from support.tiny import tiny_transformer
from support.tiny_model import open_tiny, write_tiny_target


def continuation(model: Transformer, token_ids: list[int], length: int) -> list[int]:
    return run(NativeTarget(model), prompt=token_ids, max_tokens=length).ids


@pytest.fixture(scope="module")
def small() -> Transformer:
    return tiny_transformer(seed=3)


def draft(drafter: Drafter, requests: list[Request]) -> list[list[int]]:
    drafts = drafter.propose(requests)
    assert not any(made.fault for made in drafts)
    return [list(made.token_ids) for made in drafts]


def test_a_draft_is_the_models_own_greedy_continuation(small: Transformer) -> None:
    texts = [text(30, 1), text(7, 2)]
    requests = [request(ids, room) for ids, room in zip(texts, (5, 3), strict=True)]
    assert draft(DraftModelDrafter(small, 97, 5), requests) == [
        continuation(small, ids, n) for ids, n in zip(texts, (5, 3), strict=True)
    ]


@pytest.mark.parametrize("kept", [0, 1, 3, 4])
def test_what_was_not_kept_is_forgotten(small: Transformer, kept: int) -> None:
    drafter = DraftModelDrafter(small, 97, 4)
    one = request(text(12))
    (tokens,) = draft(drafter, [one])
    grow(one, [*tokens[:kept], 55])
    assert draft(drafter, [one]) == [continuation(small, one.token_ids, 4)]


def test_requests_leave_and_some_have_nothing_to_draft(small: Transformer) -> None:
    drafter = DraftModelDrafter(small, 97, 4)
    requests = [request(text(10, seed), room) for seed, room in enumerate((2, 0, 4))]
    assert [len(tokens) for tokens in draft(drafter, requests)] == [2, 0, 4]
    drafter.end(requests[0])
    rest = [requests[2], request(requests[1].token_ids, 3)]
    for one in rest:
        grow(one, [8, 9])
    assert draft(drafter, rest) == [
        continuation(small, one.token_ids, n) for one, n in zip(rest, (4, 3), strict=True)
    ]
    empty = [request(text(5), 0), request(text(6), 0)]
    assert draft(drafter, empty) == [[], []]
    for one in (*rest, *empty):
        drafter.end(one)
    assert drafter.num_held == 0


def test_bystanders_are_left_alone_and_those_that_missed_rounds_catch_up(
    small: Transformer,
) -> None:
    drafter = DraftModelDrafter(small, 97, 3)
    requests = [request(text(5 + seed, seed)) for seed in range(4)]
    draft(drafter, requests)
    for round_ in range(4):
        asked = [requests[place] for place in ((0, 3), (1, 2), (3, 0), (2,))[round_]]
        for one in requests:
            grow(one, text(1 + round_, seed=round_ + len(one)))
        assert draft(drafter, asked) == [continuation(small, one.token_ids, 3) for one in asked]


def test_answers_are_the_plain_ones(small: Transformer) -> None:
    engine = NativeTarget(tiny_transformer(seed=0))
    plain = run(engine, max_tokens=30)
    assert run(engine, DraftModelDrafter(small, 97, 4), max_tokens=30).ids == plain.ids
    batch = run_all(
        engine,
        DraftModelDrafter(small, 97, 4),
        [make(engine, PROMPT, max_tokens=n) for n in (3, 30, 12)],
    )
    assert [one.ids for one in batch] == [plain.ids[:n] for n in (3, 30, 12)]


def test_others_join_and_leave_when_its_cache_has_grown(small: Transformer) -> None:
    target, lengths = NativeTarget(tiny_transformer(seed=1)), (40, 60, 80, 100)
    runs = [make(target, text(5, length), max_tokens=length) for length in lengths]
    run_all(target, DraftModelDrafter(small, 97, 4), runs, max_batch=2)
    assert [one.faults for one in runs] == [[]] * 4


def test_the_target_as_its_own_drafter_is_always_right() -> None:
    engine = NativeTarget(tiny_transformer(seed=0))
    rounds = run(engine, DraftModelDrafter(engine.model, 97, 4), max_tokens=26).rounds
    assert [(stats.draft_length, stats.num_accepted) for stats in rounds] == [(4, 4)] * 5


def test_a_text_that_the_drafter_does_not_know_gets_a_fault_and_a_long_one_no_draft() -> None:
    drafter = DraftModelDrafter(tiny_transformer(vocab_size=50), 97, 4)
    drafts = drafter.propose([request([1, 60, 2]), request([1, 2, 3])])
    assert "does not know" in (drafts[0].fault or "")
    assert len(drafts[1].token_ids) == 4
    short = DraftModelDrafter(tiny_transformer(max_position_embeddings=16), 97, 6)
    assert [len(draft(short, [request(text(length))])[0]) for length in (12, 16, 20)] == [4, 0, 0]


def test_logits_that_are_not_finite_are_a_fault_of_their_own_request() -> None:
    model = tiny_transformer(seed=3, tie_word_embeddings=False)
    model.embedding.data[77] = float("nan")
    drafter = DraftModelDrafter(model, 97, 4)
    bad, good = drafter.propose([request([1, 77, 2]), request([1, 2, 3])])
    assert bad == not_finite(3)
    assert list(good.token_ids) == continuation(model, [1, 2, 3], 4)


def test_ids_beyond_the_targets_vocabulary_are_never_proposed() -> None:
    (tokens,) = draft(DraftModelDrafter(tiny_transformer(), 20, 8), [request(text(9))])
    assert len(tokens) == 8
    assert max(tokens) < 20


def test_another_tokenizer_is_refused(tiny_target: Path, tmp_path: Path) -> None:
    target = open_tiny(tiny_target)
    parts = Parts(target, NativeTarget(target.transformer), draft_model=open_tiny(tiny_target))
    drafter = DraftModelConfig(draft_length=3).build(parts).drafter
    assert isinstance(drafter, DraftModelDrafter)
    assert drafter.max_draft_length == 3
    parts.draft_model = open_tiny(write_tiny_target(tmp_path / "other", texts=["zigzag zoo"] * 9))
    with pytest.raises(InvalidCheckpoint, match="the tokenizers differ"):
        DraftModelConfig().build(parts)


def test_a_block_drafters_clean_rows_draft_too() -> None:
    drafter = tiny_drafter()
    head = DraftModelDrafter(autoregressive_head(drafter), 97, 4)
    assert draft(head, [request(text(9))]) == [continuation(drafter.transformer, text(9), 4)]
    with pytest.raises(InvalidRequest, match="clean rows"):
        autoregressive_head(tiny_drafter(scope="all"))
