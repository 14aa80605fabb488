"""One packed pass over sequences of different length against one pass for each."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from d3d.engine.drafter import Draft
from d3d.methods.async_ import packed_pass
from d3d.methods.async_.outcomes import Outcome
from d3d.methods.async_.packed_pass import PackedDrafter, PackedSession
from d3d.methods.async_.preparer import DraftTask, PrepareTask
from d3d.model.drafter import DeltaConfig, DrafterModel
from d3d.model.transformer import Transformer
from support.drafters import every_kind, text, tiny_drafter
from support.tiny import tiny_transformer

Kind = dict[str, Any]
Asked = tuple[list[int], list[int], list[Outcome], int]

ASKED: list[Asked] = [
    (
        text(11, seed=1),
        [7, 50, 3, 88],
        [Outcome(4, 9), Outcome(0, 1), Outcome(2, 60), Outcome(2, 61)],
        6,
    ),
    (text(40, seed=2), [], [Outcome(0, 5)], 6),
    (text(2, seed=3), [4, 8], [Outcome(2, 9), Outcome(1, 3)], 3),
    (
        text(23, seed=4),
        [1, 2, 3, 4, 5, 6],
        [Outcome(number, 30 + number) for number in range(6)],
        6,
    ),
    ([17], [30], [Outcome(1, 2), Outcome(0, 2)], 1),
]


def open_sessions(drafter: PackedDrafter) -> list[PackedSession]:
    return [drafter.open(8) for _ in ASKED]


def further(round_id: int, asked: Asked) -> Asked:
    """A round later: some tokens were kept."""
    known, draft, outcomes, length = asked
    outcome = outcomes[round_id % len(outcomes)]
    return [*known, *draft[: outcome.num_accepted], outcome.bonus_token], draft, outcomes, length


def with_head(model: DrafterModel) -> DrafterModel:
    assert model.previous_token_head is not None
    torch.nn.init.normal_(
        model.previous_token_head.up, std=0.3, generator=torch.Generator().manual_seed(2)
    )
    return model


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[Tensor]]:
    """The logits of every pass, and how many rows it had."""
    seen: dict[str, list[Any]] = {"logits": [], "passes": []}
    logits_of, hidden_of = DrafterModel.draft_logits, DrafterModel.hidden

    def watch_logits(self: DrafterModel, hidden: Tensor, target_vocab_size: int) -> Tensor:
        logits = logits_of(self, hidden, target_vocab_size)
        seen["logits"].append(logits.clone())
        return logits

    def watch_hidden(self: DrafterModel, token_ids: Tensor, *rest: Any) -> Tensor:
        seen["passes"].append(token_ids.shape)
        return hidden_of(self, token_ids, *rest)

    monkeypatch.setattr(DrafterModel, "draft_logits", watch_logits)
    monkeypatch.setattr(DrafterModel, "hidden", watch_hidden)
    return seen


THINNED = {
    "block_attention": "causal",
    "slot_layers": (1,),
    "delta": DeltaConfig(rank=4, layers=(1,)),
}


@every_kind
@pytest.mark.parametrize("scope", ["slots", "all", None])
def test_each_sequence_has_what_a_pass_of_its_own_gives(
    kind: Kind, scope: str | None, seen: dict[str, list[Any]]
) -> None:
    check(with_head(tiny_drafter(scope=scope, previous_token_width=8, **kind)), seen)


@pytest.mark.parametrize(
    "kind",
    [THINNED, {"anchor_slot": True}, THINNED | {"anchor_slot": True}],
    ids=["thinned", "anchor slot", "both"],
)
def test_slots_that_pass_layers_by_do_so_in_a_shared_pass_too(
    kind: Kind, seen: dict[str, list[Any]]
) -> None:
    check(tiny_drafter(**kind), seen)


def check(model: DrafterModel, seen: dict[str, list[Any]]) -> None:
    drafter = PackedDrafter(model, 97)
    together, alone = open_sessions(drafter), open_sessions(drafter)
    asked = list(ASKED)
    for round_id in range(3):
        blocks = drafter.prepare_together(
            [PrepareTask(session, *each) for session, each in zip(together, asked, strict=True)]
        )
        assert len(seen["passes"]) == 1
        assert seen["passes"][0][0] == 1
        joint = {len(rows[0]): list(rows) for rows in seen["logits"]}  # by draft length
        seen["logits"].clear()
        expected = [session.prepare(*each) for session, each in zip(alone, asked, strict=True)]
        assert blocks == expected
        for logits in seen["logits"]:
            for rows in logits:
                other = joint[len(rows)].pop(0)
                assert (other - rows).abs().max() < 1e-5 * rows.abs().max()
        assert not any(joint.values())
        assert sum(shape[1] for shape in seen["passes"][1:]) == seen["passes"][0][1], (
            "nothing is padded"
        )
        for session, other, (known, *_) in zip(together, alone, asked, strict=True):
            assert session.length == other.length == len(known)
            for mine, its in zip(
                session.cache.read(1, len(known)), other.cache.read(1, len(known)), strict=True
            ):
                torch.testing.assert_close(mine, its, atol=1e-5, rtol=1e-5)
        seen["logits"].clear()
        seen["passes"].clear()
        asked = [further(round_id, each) for each in asked]


def test_drafts_share_a_pass_too_and_the_likely_outcomes_follow(seen: dict[str, list[Any]]) -> None:
    drafter = PackedDrafter(tiny_drafter(), 97)
    together, alone = open_sessions(drafter), open_sessions(drafter)
    blocks = drafter.draft_together(
        [DraftTask(session, known, 5) for session, (known, *_) in zip(together, ASKED, strict=True)]
    )
    assert len(seen["passes"]) == 1
    assert blocks == [
        session.draft(known, 5) for session, (known, *_) in zip(alone, ASKED, strict=True)
    ]
    for session, other, block, (known, *_) in zip(together, alone, blocks, ASKED, strict=True):
        assert (
            session.likely_outcomes(known, block.token_ids, 8)
            == other.likely_outcomes(known, block.token_ids, 8)
            != []
        )


def test_many_rows_are_shared_out_over_passes(
    seen: dict[str, list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter = PackedDrafter(tiny_drafter(), 97)
    tasks = [
        PrepareTask(session, *each)
        for session, each in zip(open_sessions(drafter), ASKED, strict=True)
    ]
    expected = [
        session.prepare(*each) for session, each in zip(open_sessions(drafter), ASKED, strict=True)
    ]
    rows = [shape[1] for shape in seen["passes"]]
    seen["passes"].clear()
    monkeypatch.setattr(packed_pass, "PASS_ROWS", max(rows))
    assert drafter.prepare_together(tasks) == expected
    assert 2 < len(seen["passes"]) < len(tasks)
    assert all(shape[1] <= max(rows) for shape in seen["passes"])
    assert sum(shape[1] for shape in seen["passes"]) == sum(rows)


def test_what_can_not_be_drafted_costs_the_others_nothing() -> None:
    """An id that the drafter does not know, a text beyond its context, a draft length of nothing,
    no outcomes."""
    drafter = PackedDrafter(
        tiny_drafter(tiny_transformer(seed=1, vocab_size=50, max_position_embeddings=32)), 97
    )
    texts = [[3, 4, 5], [3, 60], [1 + number % 40 for number in range(40)], [9, 8]]
    first, unknown, long, other = drafter.draft_together(
        [DraftTask(drafter.open(4), known, 4) for known in texts]
    )
    assert [first, other] == [drafter.open(4).draft(known, 4) for known in (texts[0], texts[3])]
    assert "ids below 50" in str(unknown.fault)
    assert long == Draft()
    nothing = drafter.prepare_together(
        [
            PrepareTask(drafter.open(4), [3, 4], [5], [], 4),
            PrepareTask(drafter.open(4), [3, 4], [5], [Outcome(1, 2)], 0),
        ]
    )
    assert nothing == [{}, {}]
    assert drafter.prepare_together([]) == drafter.draft_together([]) == []


def test_a_task_that_is_no_task_is_refused() -> None:
    drafter = PackedDrafter(tiny_drafter(), 97)
    with pytest.raises(ValueError, match="no outcome of a draft of 1 tokens"):
        drafter.prepare_together([PrepareTask(drafter.open(4), [3, 4], [5], [Outcome(2, 1)], 4)])


def test_a_pass_alone_goes_the_short_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mask reaches the decoder, which prepares it once for all layers."""
    masks: list[Tensor | None] = []
    hidden = Transformer.hidden

    def watch(
        self: Transformer, x: Tensor, positions: Tensor, mask: Tensor | None, *rest: Any
    ) -> Tensor:
        masks.append(mask)
        return hidden(self, x, positions, mask, *rest)

    monkeypatch.setattr(Transformer, "hidden", watch)
    PackedDrafter(tiny_drafter(), 97).open(4).draft([3, 4], 4)
    assert [mask is None for mask in masks] == [False]
