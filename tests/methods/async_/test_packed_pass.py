"""A packed pass against every successor drafted alone, straight from the definition."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from d3d.methods.async_ import packed_pass
from d3d.methods.async_.outcomes import Doubt, Outcome
from d3d.methods.async_.packed_layout import PackedRows, packed_rows
from d3d.methods.async_.packed_pass import PackedDrafter, PackedSession
from d3d.methods.serial.denoise import not_finite
from d3d.methods.serial.drafter import BlockDrafter
from d3d.model.drafter import DrafterConfig, DrafterModel
from d3d.model.layout import MASKED
from d3d.model.masks.dense import elementwise
from d3d.model.masks.rules import packed_rules, union
from support.drafters import block_logits, every_kind, request, text, tiny_drafter
from support.tiny import tiny_transformer

Kind = dict[str, Any]
DRAFT = [7, 50, 3, 88]
OUTCOMES = [
    Outcome(4, 9),
    Outcome(0, 1),
    Outcome(2, 60),
    Outcome(2, 61),
    Outcome(4, 10),
    Outcome(1, 9),
    Outcome(3, 5),
]
every_scope = pytest.mark.parametrize("scope", ["slots", "all", None])


def open_session(model: DrafterModel, budget: int = 16) -> PackedSession:
    return PackedDrafter(model, 97).open(budget)


def after(token_ids: list[int], draft: list[int], outcome: Outcome) -> list[int]:
    return [*token_ids, *draft[: outcome.num_accepted], outcome.bonus_token]


def with_head(model: DrafterModel) -> DrafterModel:
    assert model.previous_token_head is not None
    torch.nn.init.normal_(
        model.previous_token_head.up, std=0.3, generator=torch.Generator().manual_seed(2)
    )
    return model


@pytest.fixture
def seen_logits(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The logits of every packed pass, as they were before a head chose among them."""
    seen: list[Tensor] = []
    original = DrafterModel.draft_logits

    def watch(self: DrafterModel, hidden: Tensor, target_vocab_size: int) -> Tensor:
        logits = original(self, hidden, target_vocab_size)
        seen.append(logits.clone())
        return logits

    monkeypatch.setattr(DrafterModel, "draft_logits", watch)
    return seen


@every_kind
@every_scope
def test_each_branch_equals_its_successor_drafted_alone(
    kind: Kind, scope: str | None, seen_logits: list[Tensor]
) -> None:
    model = tiny_drafter(scope=scope, **kind)
    session = open_session(model)
    token_ids = text(11)
    for length in (6, 3, 1):
        blocks = session.prepare(token_ids, DRAFT, OUTCOMES, length)
        assert list(blocks) == OUTCOMES
        for branch, outcome in enumerate(OUTCOMES):
            expected = block_logits(model, after(token_ids, DRAFT, outcome), [MASKED] * length)
            assert (
                seen_logits[-1][branch, :length] - expected
            ).abs().max() < 1e-5 * expected.abs().max()
            assert list(blocks[outcome].token_ids) == expected.argmax(-1).tolist()
        assert len({block.token_ids for block in blocks.values()}) > 2, (
            "the branches must not all say the same"
        )
        token_ids = after(token_ids, DRAFT, OUTCOMES[length % 3])


@every_kind
@every_scope
def test_over_many_rounds_the_ids_are_those_of_a_drafter_that_waits_for_the_verdict(
    kind: Kind, scope: str | None
) -> None:
    model = with_head(tiny_drafter(scope=scope, previous_token_width=8, **kind))
    waiting = BlockDrafter(model, 97)
    session = open_session(model)
    one = request(text(9))
    draft = session.draft(one.token_ids, 6).token_ids
    for number in range(12):
        assert draft == waiting.propose([one])[0].token_ids
        outcomes = session.likely_outcomes(one.token_ids, draft, 12)
        blocks = session.prepare(one.token_ids, draft, outcomes, 6)
        verdict = outcomes[number % len(outcomes)]
        one.token_ids += [*draft[: verdict.num_accepted], verdict.bonus_token]
        draft = blocks[verdict].token_ids
    assert len(one) > 20


def test_the_last_slot_guesses_what_a_longer_causal_block_would_draft(
    seen_logits: list[Tensor],
) -> None:
    for alignment in ("next", "same"):
        model = tiny_drafter(alignment=alignment)
        open_session(model).prepare(text(8), DRAFT, [Outcome(2, 5)], 4)
        longer = block_logits(model, after(text(8), DRAFT, Outcome(2, 5)), [MASKED] * 5)
        torch.testing.assert_close(seen_logits[-1][0], longer, atol=1e-5, rtol=1e-4)


@every_kind
@pytest.mark.parametrize("cached", [0, 3, 9])
def test_the_dense_mask_equals_the_rule_applied_to_one_pair_at_a_time(
    kind: Kind, cached: int
) -> None:
    config = tiny_drafter(**kind).config
    layout = packed_rows(config, cached, text(9), DRAFT, OUTCOMES, 5).layout
    rows = layout.rows[0]
    rule = union(packed_rules(config.block_attention))
    assert torch.equal(layout.mask[0, :, cached:], elementwise(rule, rows, rows))
    trunk_and_more = layout.mask[0, :, :cached]
    assert trunk_and_more.all(), "every row sees all committed tokens that were cached"


@pytest.mark.parametrize("attention", ["causal", "bidirectional"])
def test_who_sees_whom_is_what_the_definition_says(attention: str) -> None:
    """Text 0..3, draft at 4 and 5; branch a behind one drafted token, branch b behind both; two
    slots and a guess slot each."""
    config = tiny_drafter(block_attention=attention, alignment="same").config
    outcomes = [Outcome(1, 20), Outcome(2, 30)]
    layout = packed_rows(config, 0, [10, 11, 12, 13], [14, 15], outcomes, 2).layout
    names = ["t0", "t1", "t2", "t3", "d1", "d2", "a", "b", "a1", "a2", "a?", "b1", "b2", "b?"]
    clean_a, clean_b = (
        {"t0", "t1", "t2", "t3", "d1", "a"},
        {"t0", "t1", "t2", "t3", "d1", "d2", "b"},
    )
    sees = {name: set(names[: place + 1]) for place, name in enumerate(names[:6])} | {
        "a": clean_a,
        "b": clean_b,
    }
    for branch, clean in (("a", clean_a), ("b", clean_b)):
        both = {f"{branch}1", f"{branch}2"}
        sees[f"{branch}1"] = clean | (both if attention == "bidirectional" else {f"{branch}1"})
        sees[f"{branch}2"] = clean | both
        sees[f"{branch}?"] = clean | both | {f"{branch}?"}
    got = {
        name: {names[key] for key in row.nonzero()[:, 0].tolist()}
        for name, row in zip(names, layout.mask[0], strict=True)
    }
    assert got == sees
    assert layout.rows.position[0].tolist() == [0, 1, 2, 3, 4, 5, 5, 6, 6, 7, 8, 7, 8, 9]


@every_kind
def test_hidden_tokens_change_no_logit_that_does_not_see_them(
    kind: Kind, seen_logits: list[Tensor]
) -> None:
    """Whatever a branch must not see: rejected drafted tokens, and the bonus tokens of other
    branches."""
    model = tiny_drafter(scope="all", **kind)
    outcomes = [Outcome(1, 9), Outcome(3, 5)]
    for draft, others in (
        (DRAFT, outcomes),
        ([7, 51, 4, 89], outcomes),
        (DRAFT, [Outcome(1, 9), Outcome(3, 6)]),
    ):
        open_session(model).prepare(text(8), draft, others, 5)
    first, other_draft, other_bonus = seen_logits
    torch.testing.assert_close(other_draft[0], first[0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(other_bonus[0], first[0], atol=1e-5, rtol=1e-5)
    assert (other_draft[1] - first[1]).abs().max() > 1e-2
    assert (other_bonus[1] - first[1]).abs().max() > 1e-2


@every_kind
@pytest.mark.parametrize("kept", [0, 2, 4])
def test_clean_rows_of_drafted_tokens_that_were_kept_are_not_computed_again(
    kind: Kind, kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    cached: list[int] = []

    def watch(config: DrafterConfig, length: int, *rest: Any) -> PackedRows:
        cached.append(length)
        return packed_rows(config, length, *rest)

    monkeypatch.setattr(packed_pass, "packed_rows", watch)
    model, known = tiny_drafter(**kind), text(11)
    session, fresh = open_session(model), open_session(model)
    session.prepare(known, DRAFT, [Outcome(1, 9)], 4)
    then = after(known, DRAFT, Outcome(kept, 60))
    assert session.draft(then, 5) == fresh.draft(then, 5)
    assert cached == [0, len(known) + kept, 0]
    assert session.prepare(then, DRAFT, OUTCOMES, 4) == fresh.prepare(then, DRAFT, OUTCOMES, 4)
    foreign = [*then, *DRAFT[:1], 77, *DRAFT[2:], 8]
    assert session.prepare(foreign, DRAFT, OUTCOMES, 4) == open_session(model).prepare(
        foreign, DRAFT, OUTCOMES, 4
    )
    assert cached[5] == len(then) + 1, "behind a token that was not kept nothing is of use"


@every_kind
@every_scope
def test_nothing_of_a_pass_but_committed_tokens_stays_in_the_cache(
    kind: Kind, scope: str | None
) -> None:
    model = tiny_drafter(scope=scope, **kind)
    session = open_session(model)
    token_ids = text(7)
    for round_id in range(3):
        session.prepare(token_ids, DRAFT, OUTCOMES, 6)
        assert session.length == len(token_ids)
        fresh = open_session(model)
        fresh.prepare(token_ids, [], [Outcome(0, 1)], 6)
        for layer in range(2):
            for cached, clean in zip(
                session.cache.read(layer, len(token_ids)),
                fresh.cache.read(layer, len(token_ids)),
                strict=True,
            ):
                torch.testing.assert_close(cached, clean, atol=1e-5, rtol=1e-5)
        token_ids = [*token_ids, *text(1 + round_id, seed=round_id)]


@pytest.mark.parametrize("rows", [1, 3, 8])
def test_catching_up_in_chunks_changes_nothing(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_drafter(scope="all")
    expected = open_session(model).prepare(text(40), DRAFT, OUTCOMES, 6)
    monkeypatch.setattr(packed_pass, "CATCH_UP_ROWS", rows)
    assert open_session(model).prepare(text(40), DRAFT, OUTCOMES, 6) == expected


def test_a_text_of_one_token_is_enough() -> None:
    model = tiny_drafter()
    assert open_session(model).draft([5], 6) == BlockDrafter(model, 97).propose([request([5])])[0]


# Which outcomes


def test_a_draft_of_the_last_pass_needs_no_further_pass(seen_logits: list[Tensor]) -> None:
    session = open_session(tiny_drafter())
    token_ids = text(9)
    draft = session.draft(token_ids, 6).token_ids
    outcomes = session.likely_outcomes(token_ids, draft[:4], 8)
    assert len(seen_logits) == 1
    assert len(outcomes) == len(set(outcomes)) == 8
    assert all(
        outcome.num_accepted == 4 or outcome.bonus_token != draft[outcome.num_accepted]
        for outcome in outcomes
    )
    assert any(outcome.num_accepted == 4 for outcome in outcomes)


def test_without_a_draft_the_drafter_guesses_the_next_token() -> None:
    model = tiny_drafter()
    outcomes = open_session(model).likely_outcomes(text(9), (), 3)
    best = block_logits(model, text(9), [MASKED])[0].topk(3).indices.tolist()
    assert outcomes == [Outcome(0, token_id) for token_id in best]


@pytest.mark.parametrize("scope", ["slots", "all"])
def test_clean_rows_guess_what_a_causal_model_would(
    scope: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For any draft, whoever made it; and the pass that prepares goes on behind it as if there had
    been none."""
    monkeypatch.setattr(Doubt, "weight", 1.0)
    model = tiny_drafter(scope=scope)
    session = PackedDrafter(model, 97, "clean_rows").open(16)
    token_ids = text(9)
    for _ in range(3):
        outcomes = session.likely_outcomes(token_ids, DRAFT, 12)
        chances = [
            block_logits(model, [*token_ids, *DRAFT[:kept]], [MASKED])[0].softmax(-1)
            for kept in range(5)
        ]
        reached = torch.tensor(
            [1.0, *(row[token] for row, token in zip(chances, DRAFT, strict=False))]
        ).cumprod(0)
        table = torch.stack(chances) * reached[:, None]
        table[torch.arange(4), torch.tensor(DRAFT)] = 0.0
        best = [Outcome(*divmod(place, 97)) for place in table.flatten().topk(12).indices.tolist()]
        assert outcomes[:11] == best[:11]
        assert session.length == len(token_ids)
        assert session.prepare(token_ids, DRAFT, outcomes, 6) == open_session(model).prepare(
            token_ids, DRAFT, outcomes, 6
        )
        token_ids = after(token_ids, DRAFT, outcomes[3])


@pytest.mark.parametrize(("alignment", "learns"), [("next", True), ("same", False)])
def test_a_sequence_learns_what_the_anchors_own_doubt_is_worth(
    alignment: str, learns: bool
) -> None:
    """Where the first drafted token has always been kept, verdicts that reject it are listed last;
    slots' chances stay as they are."""
    session = open_session(tiny_drafter(alignment=alignment))
    token_ids = text(9)
    listed = []
    for _ in range(12):
        draft = session.draft(token_ids, 3).token_ids
        outcomes = session.likely_outcomes(token_ids, draft, 16)
        assert session.likely_outcomes(token_ids, draft, 16) == outcomes, (
            "asking twice teaches nothing"
        )
        listed.append([outcome.num_accepted for outcome in outcomes].count(0))
        token_ids = [*token_ids, draft[0], 5]
    assert (session._doubt.weight < 0.1) is learns
    if learns:
        assert listed[0] > 0
        assert listed[-1] == 0


def test_clean_rows_beyond_the_drafters_context_guess_nothing() -> None:
    model = tiny_drafter(tiny_transformer(seed=1, max_position_embeddings=16))
    assert PackedDrafter(model, 97, "clean_rows").open(16).likely_outcomes(text(14), DRAFT, 4) == []


def test_a_foreign_draft_has_no_likely_outcomes() -> None:
    session = open_session(tiny_drafter())
    draft = session.draft(text(9), 6).token_ids
    assert session.likely_outcomes(text(9), [(draft[0] + 1) % 90, *draft[1:]], 4) == []


# Limits and faults


def test_near_the_end_of_the_drafters_context_blocks_are_cut_and_then_left_out() -> None:
    model = tiny_drafter(tiny_transformer(seed=1, max_position_embeddings=16))
    blocks = open_session(model).prepare(text(10), DRAFT, OUTCOMES, 6)
    assert {outcome: len(block.token_ids) for outcome, block in blocks.items()} == {
        o: min(6, 16 - 11 - o.num_accepted) for o in OUTCOMES
    }
    assert set(open_session(model).prepare(text(13), DRAFT[:2], OUTCOMES[1:4], 6)) == {OUTCOMES[1]}
    assert open_session(model).prepare(text(40), DRAFT, OUTCOMES, 6) == {}
    assert open_session(model).draft(text(40), 6).token_ids == ()
    assert open_session(model).likely_outcomes(text(40), (), 6) == []


def test_weights_that_are_not_finite_are_a_fault() -> None:
    model = tiny_drafter()
    model.set_mask_vector(torch.full_like(model.mask_vector, float("nan")))  # type: ignore[arg-type]
    block = open_session(model).draft(text(5), 6)
    assert block.token_ids == ()
    assert block == not_finite(5)


def test_a_text_with_ids_that_the_drafter_does_not_know_is_a_fault() -> None:
    model = tiny_drafter(tiny_transformer(seed=1, vocab_size=50))
    session = open_session(model)
    assert "ids below 50" in str(session.draft([1, 2, 60], 6).fault)
    assert session.prepare([1, 60], [2], [Outcome(0, 3)], 6) == {}
    assert set(session.prepare([1, 2], [2], [Outcome(0, 3), Outcome(0, 60)], 6)) == {Outcome(0, 3)}


@pytest.mark.parametrize(
    "outcomes",
    [[Outcome(5, 1)], [Outcome(0, n) for n in range(17)]],
    ids=["beyond the draft", "beyond the budget"],
)
def test_impossible_outcomes_are_refused(outcomes: list[Outcome]) -> None:
    with pytest.raises(ValueError, match=r"outcomes? "):
        open_session(tiny_drafter()).prepare(text(5), DRAFT, outcomes, 6)
