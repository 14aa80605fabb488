"""The replayed evaluation against a drafter that really drafts: rounds, acceptance, and the ranks
of bonus tokens."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch
from torch import Tensor

from d3d.errors import InvalidRequest, NotFinite
from d3d.methods.async_.packed_pass import PackedDrafter
from d3d.methods.fused.engine import FusedTarget
from d3d.methods.serial.drafter import BlockDrafter
from d3d.model.drafter import DrafterModel
from d3d.target.native import NativeTarget
from d3d.train import replay as replay_module
from d3d.train.acceptance import RECALL_TOPS, RoundCounts, total
from d3d.train.corpus import Sample
from d3d.train.replay import (
    by_source,
    predict_blocks,
    replay,
    replay_fused,
    replay_outcomes,
    walk,
)
from support.drafters import block_logits, every_kind, reference_draft, request, text, tiny_drafter
from support.runs import make, run, run_all
from support.tiny import tiny_transformer

Kind = dict[str, Any]


def answer(
    model: DrafterModel, prompt: list[int], length: int, seed: int, block: int = 6
) -> list[int]:
    """An answer that the drafter guesses in part: pieces of its own blocks, and then something
    else."""
    rng = random.Random(seed)
    ids = [*prompt, rng.randrange(90)]
    for kept in itertools.cycle((0, 6, 2)):
        if len(ids) - len(prompt) >= length:
            break
        ids += [*reference_draft(model, ids, block)[:kept], rng.randrange(90)]
    return ids[len(prompt) : len(prompt) + length]


def slow_replay(model: DrafterModel, samples: list[Sample], draft_length: int) -> RoundCounts:
    """Really draft, round by round, and compare with the answer."""
    acceptance = RoundCounts(draft_length)
    for sample in samples:
        drafter = BlockDrafter(model, 97, draft_length=draft_length)
        one = request(sample.prompt_ids + sample.answer_ids[:1])
        of_answer = RoundCounts(draft_length)
        while missing := sample.token_ids[len(one) :]:
            drafted = drafter.propose([one])[0].token_ids
            kept = 0
            while kept < min(len(drafted), len(missing)) and drafted[kept] == missing[kept]:
                kept += 1
            one.token_ids += missing[: kept + 1]
            of_answer.add_round(kept, len(missing[: kept + 1]))
        acceptance.add_answer(of_answer)
    return acceptance


@every_kind
@pytest.mark.parametrize("scope", ["slots", "all", None])
def test_replayed_rounds_are_the_rounds_of_a_drafter_that_really_drafts(
    kind: Kind, scope: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_drafter(scope=scope, **kind)
    samples = [
        Sample(text(n, seed=n), answer(model, text(n, seed=n), length, n), "test", 0.0, 0)
        for n, length in ((5, 30), (1, 17), (9, 2), (4, 1))
    ]
    for draft_length in (1, 2, 6):
        replayed, slow = (
            replay(model, samples, draft_length),
            slow_replay(model, samples, draft_length),
        )
        assert replayed == slow
        assert slow.committed == 29 + 16 + 1
        assert slow.answers == 3
    assert min(slow.histogram[0], slow.histogram[2], slow.histogram[6]) > 0
    monkeypatch.setattr(replay_module, "SLOTS_A_PASS", 7)  # more than one pass
    assert replay(model, samples, 6) == slow


def test_a_walk_counts_rounds_as_decoding_would() -> None:
    acceptance = walk([[7, 8], [0, 0], [0, 0], [9, 1], [0, 0]], [5, 7, 8, 6, 9, 2], 2)
    # 5 | 7 8 kept, 6 by the target | 9 kept, 2 by the target
    assert acceptance == RoundCounts(2, committed=5, histogram=[0, 1, 1])
    assert acceptance.rounds == 2
    assert acceptance.acceptance_length == 2.5
    assert acceptance.acceptance_at == [1.0, 0.5]


def test_a_block_that_ends_the_answer_has_no_bonus_token() -> None:
    acceptance = walk([[7, 8], [0, 0], [0, 0]], [5, 7, 8], 2)
    assert acceptance == RoundCounts(2, committed=2, histogram=[0, 0, 1])
    assert acceptance.rounds == 1


def test_no_rounds_are_no_division_by_zero() -> None:
    empty = RoundCounts(3)
    assert (empty.acceptance_length, empty.acceptance_at) == (0.0, [0.0, 0.0, 0.0])


def test_macro_is_the_mean_of_the_answers_own_lengths() -> None:
    parts = []
    for rounds in ([3, 3], [0], []):
        part = RoundCounts(4)
        for num_accepted in rounds:
            part.add_round(num_accepted, num_accepted + 1)
        parts.append(part)
    whole = RoundCounts(4)
    for part in parts:
        whole.add_answer(part)
    assert (whole.answers, whole.rounds) == (2, 3), (
        "an answer without a round has no acceptance length"
    )
    assert whole.acceptance_length == pytest.approx(9 / 3)
    assert whole.acceptance_length_macro == pytest.approx((4 + 1) / 2)
    assert total(4, [whole, whole]).acceptance_length_macro == whole.acceptance_length_macro
    assert total(4, [whole, whole]).rounds == 6
    with pytest.raises(ValueError, match="4 and 3"):
        whole.add(RoundCounts(3))


def test_a_sampled_answer_is_replayed_as_it_was_drawn() -> None:
    """Decoding with the row's seed takes the very rounds that its replay takes."""
    model = tiny_drafter(
        scope="all", trained=False
    )  # a drafter that knows nothing of slots, over its own target
    engine = NativeTarget(model.transformer)
    samples = []
    decoded = RoundCounts(3)
    for seed in range(4):
        prompt = text(6, seed=seed)
        answer_ids = run(engine, None, prompt, temperature=0.3, seed=seed, max_tokens=20).ids
        samples.append(Sample(prompt, answer_ids, "test", 0.3, seed))
        drafted = run(
            engine,
            BlockDrafter(model, 97),
            prompt,
            draft_length=3,
            temperature=0.3,
            seed=seed,
            max_tokens=20,
        )
        assert drafted.ids == answer_ids
        for stats in drafted.rounds:
            decoded.add_round(stats.num_accepted, stats.num_committed)
    replayed = replay(model, samples, 3)
    assert (replayed.rounds, replayed.committed) == (decoded.rounds, decoded.committed)
    cut = replay(model, samples, 3, ends=())
    assert cut.histogram == decoded.histogram, "at the limit the last token is not drafted"
    assert cut.histogram != replayed.histogram
    assert replay(model, samples, 3, ends=range(97)).histogram == replayed.histogram
    assert replayed.histogram[0] > 0
    assert sum(replayed.histogram[1:]) > 0


def test_rounds_are_told_by_source_and_temperature() -> None:
    model = tiny_drafter()
    samples = [
        Sample(text(5, seed=n), text(9, seed=n + 9), source, at, 0)
        for n, (source, at) in enumerate((("a", 0.0), ("b", 0.5), ("a", 0.0)))
    ]
    seen = itertools.count()
    groups = {
        key: replay(model, group, 4, lambda: next(seen) and None, recall=True)
        for key, group in by_source(samples).items()
    }
    assert groups == {
        ("a", 0.0): replay(model, [samples[0], samples[2]], 4, recall=True),
        ("b", 0.5): replay(model, samples[1:2], 4, recall=True),
    }
    assert next(seen) == 3
    assert total(4, groups.values()) == replay(model, samples, 4, recall=True)


# Recall of the bonus token


def guesses(logits: Tensor, drafted: int | None) -> list[int]:
    """Tokens, likeliest first, without the drafted one."""
    return [
        token
        for token in logits.sort(descending=True, stable=True).indices.tolist()
        if token != drafted
    ]


def slow_ranks(
    model: DrafterModel, samples: list[Sample], draft_length: int
) -> list[tuple[int, int]]:
    """(num_accepted, rank of the bonus token among the drafter's guesses) of every round that has
    both, straight from the definition."""
    found = []
    for sample in samples:
        ids = sample.token_ids
        position = len(sample.prompt_ids)
        while position < len(ids) - 1:
            prefix, truth = ids[: position + 1], ids[position + 1 :]
            block = reference_draft(model, prefix, draft_length)
            kept = 0
            while kept < min(draft_length, len(truth)) and block[kept] == truth[kept]:
                kept += 1
            if kept < len(truth) and kept < draft_length:
                row = block_logits(model, prefix, [-1] * draft_length)[kept]
                found.append((kept, guesses(row, block[kept]).index(truth[kept])))
            elif kept < len(truth) and draft_length < model.config.block_size:
                row = block_logits(model, prefix, [-1] * (draft_length + 1))[draft_length]
                found.append((kept, guesses(row, None).index(truth[kept])))
            position += min(kept + 1, len(truth))
    return found


@every_kind
@pytest.mark.parametrize("draft_length", [1, 2, 6])
def test_the_bonus_token_is_ranked_among_what_the_drafter_would_have_guessed(
    kind: Kind, draft_length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_drafter(**kind)
    samples = [
        Sample(text(n, seed=n), answer(model, text(n, seed=n), 30, n, draft_length), "test", 0.0, 0)
        for n in (5, 8)
    ]
    expected = RoundCounts(draft_length)
    for num_accepted, rank in slow_ranks(model, samples, draft_length):
        expected.add_bonus(num_accepted, rank)
    monkeypatch.setattr(replay_module, "SLOTS_A_PASS", 20)
    found = replay(model, samples, draft_length, recall=True)
    assert found.bonus == expected.bonus
    assert (found.bonus.wanted[draft_length] > 0) is (draft_length < 6), (
        "a full block has no room for one more guess"
    )
    assert replay(model, samples, draft_length).histogram == found.histogram, (
        "asking for ranks changes no draft"
    )


def test_ranks_cost_nothing_where_nobody_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay_module, "_ranks", None)
    model = tiny_drafter()
    assert predict_blocks(model, torch.tensor(text(9)), 3, 4).ranks is None
    assert replay(model, [Sample(text(4), text(5), "test", 0.0, 0)], 4).bonus_recall == {
        top: [None] * 5 for top in RECALL_TOPS
    }


def test_recall_counts_ranks_below_the_number_of_guesses() -> None:
    acceptance = RoundCounts(2)
    for num_accepted, rank in ((0, 0), (0, 3), (0, 4), (0, 16), (2, 1)):
        acceptance.add_bonus(num_accepted, rank)
    assert acceptance.bonus_recall == {
        1: [0.25, None, 0.0],
        4: [0.5, None, 1.0],
        16: [0.75, None, 1.0],
    }
    assert total(2, [acceptance, acceptance]).bonus_recall == acceptance.bonus_recall


def test_among_equal_logits_the_lower_id_is_first_as_in_the_choice_itself() -> None:
    logits = torch.zeros(1, 2, 5)
    logits[0, 1, 4] = 1.0
    token_ids = torch.tensor([9, 3, 2])
    drafted = logits.argmax(-1)
    assert drafted.tolist() == [[0, 4]]
    ranks = replay_module._ranks(logits, token_ids, torch.tensor([0]), 0, drafted)
    assert ranks.tolist() == [[2, 2]], "behind 1 and 2; behind 0 and 1"


def test_a_previous_token_head_is_heeded_in_replay() -> None:
    model = tiny_drafter(previous_token_width=4)
    assert model.previous_token_head is not None
    torch.nn.init.normal_(model.previous_token_head.up, generator=torch.Generator().manual_seed(3))
    samples = [Sample(text(n, seed=n), text(20, seed=n + 50), "test", 0.0, 0) for n in (5, 8)]
    plain = predict_blocks(tiny_drafter(), torch.tensor(samples[0].token_ids), 5, 6).tokens
    told = predict_blocks(model, torch.tensor(samples[0].token_ids), 5, 6).tokens
    assert not torch.equal(plain, told)
    assert replay(model, samples, 6) == slow_replay(model, samples, 6)


@pytest.mark.parametrize(
    "kind", [{}, {"previous_token_width": 8}, {"block_attention": "bidirectional"}], ids=str
)
def test_fused_rounds_are_those_of_fused_decoding(kind: dict[str, Any]) -> None:
    base = tiny_transformer(seed=1)
    engine, model = NativeTarget(base), tiny_drafter(base, trained=False, **kind)
    fused = FusedTarget(engine, model, 4, 40)
    rounds: list[int] = []
    samples = []
    for seed in range(4):
        one = run_all(fused, fused, [make(engine, text(5, seed=seed), max_tokens=40)], 4)[0]
        rounds += [stats.num_accepted for stats in one.rounds]
        samples.append(Sample(text(5, seed=seed), one.ids, "test", 0.0, 0))
    replayed = replay_fused(model, samples, 4, ends=())
    assert replayed.histogram == [rounds.count(number) for number in range(5)]


def test_logits_that_are_not_finite_are_an_error_and_no_low_acceptance() -> None:
    model = tiny_drafter()
    samples = [Sample(text(4), text(9), "test", 0.0, 0)]
    assert model.mask_vector is not None
    model.mask_vector.data.fill_(float("nan"))
    with pytest.raises(NotFinite, match="in a replayed draft pass, for the token at position 5"):
        replay(model, samples, 3)
    with pytest.raises(InvalidRequest, match="can't be replayed: the drafter's logits are not"):
        replay_outcomes(PackedDrafter(model, 97), samples, 3)
    model = tiny_drafter(trained=False)
    model.mask_vector.data.fill_(float("nan"))  # type: ignore[union-attr]
    with pytest.raises(NotFinite, match="replayed draft pass"):
        replay_fused(model, samples, 3)
