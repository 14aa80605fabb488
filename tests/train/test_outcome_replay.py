"""Hit rates of replayed rounds against the rounds of async mode itself, and against budgets tried
one by one."""

from __future__ import annotations

from functools import partial

import pytest

from d3d.engine.drafter import Draft
from d3d.methods.async_.outcomes import Outcome, Place, likely_outcomes
from d3d.methods.async_.packed_pass import PackedDrafter
from d3d.train.acceptance import HitCounts, total_hits
from d3d.train.corpus import Sample
from d3d.train.replay import _is_listed, replay, replay_outcomes
from support.drafters import reference_draft, text, tiny_drafter
from support.tiny import tiny_transformer


class Scripted:
    """A preparer and its session: fixed blocks and places by the length of the text."""

    def __init__(self, blocks: dict[int, tuple[int, ...]], places: dict[int, list[Place]]) -> None:
        self.blocks, self.places = blocks, places
        self.asked: list[tuple[int, int]] = []

    def open(self, outcome_budget: int) -> Scripted:
        return self

    def draft(self, text: list[int], draft_length: int) -> Draft:
        return Draft(self.blocks[len(text)][:draft_length])

    def likely_outcomes(
        self, text: list[int], draft: tuple[int, ...], budget: int
    ) -> list[Outcome]:
        self.asked.append((len(text), budget))
        return likely_outcomes(draft, self.places[len(text)], budget)

    def prepare(self, *_: object) -> dict[Outcome, Draft]:
        raise AssertionError("nobody needs the successors")


def place(*token_ids: int) -> Place:
    """The first has half of what is left, and so on."""
    return Place(token_ids, tuple(0.5**n for n in range(1, len(token_ids) + 1)))


def test_rounds_and_hits_by_hand() -> None:
    # text 1 | 5; answer 5 7 8 6 9 2 3: round at length 2 keeps 7 8, bonus 6; at 5 keeps 9, bonus 2;
    # at 7 nothing follows the round
    preparer = Scripted(
        {2: (7, 8), 5: (9, 1), 7: (3, 3)},
        {2: [place(7, 4), place(8, 3), place(1, 6)], 5: [place(9, 4), place(1, 2), place(8)]},
    )
    sample = Sample([1], [5, 7, 8, 6, 9, 2, 3], "test", 0.0, 0)
    acceptance, hits = replay_outcomes(preparer, [sample], 2, budgets=(1, 2, 8))
    assert acceptance.histogram == [0, 2, 1]
    assert preparer.asked == [(2, 8), (5, 8)], "the last round wants no successor"
    assert hits.wanted == [0, 1, 1]
    # behind 7 8: (0, 4) .25, (1, 3) .125, (2, 1) .125, (2, 6) .0625; behind 9 1: (0, 4) .25, (1, 2)
    # .125, (2, 8) .125
    assert hits.hits == {1: [0, 0, 0], 2: [0, 0, 0], 8: [0, 1, 1]}
    assert hits.hit_rate == {1: 0.0, 2: 0.0, 8: 1.0}
    assert hits.hit_rate_at[8] == [None, 1.0, 1.0]


def samples() -> list[Sample]:
    """Answers that the drafter guesses in part."""
    found = []
    for seed in range(3):
        model, prompt = tiny_drafter(), text(5, seed=seed)
        ids = list(prompt)
        for kept in (6, 0, 2, 6, 4, 1, 3):
            block = reference_draft(model, ids, 6)
            ids += [
                *block[:kept],
                (block[kept] + 1) % 90 if kept < 6 and seed else text(1, seed=len(ids))[0],
            ]
        found.append(Sample(prompt, ids[5:], "test", 0.0, seed))
    return found


@pytest.mark.parametrize("guess_from", ["block", "clean_rows"])
def test_one_list_serves_all_budgets(guess_from: str) -> None:
    """The hits of budgets tried together are those of each tried alone; and rounds are those of
    serial mode."""
    model = tiny_drafter()
    preparer = PackedDrafter(model, 97, guess_from)  # type: ignore[arg-type]
    budgets = (1, 2, 3, 4, 8, 64)
    acceptance, hits = replay_outcomes(preparer, samples(), 4, budgets=budgets)
    assert acceptance == replay(model, samples(), 4)
    assert sum(hits.wanted) == acceptance.rounds - 3
    for budget in budgets:
        _, alone = replay_outcomes(preparer, samples(), 4, budgets=(budget,))
        assert alone.hits == {budget: hits.hits[budget]}
    rates = [hits.hit_rate[budget] or 0.0 for budget in budgets]
    assert rates[-1] > rates[0]


def test_clean_rows_of_the_targets_own_weights_foresee_a_greedy_answer() -> None:
    """A drafter whose clean rows are the target's knows the verdict as soon as it has run over the
    draft, and learns to trust itself."""
    base = tiny_transformer(seed=1)
    model = tiny_drafter(base)
    answers = []
    for seed in range(3):
        ids = text(5, seed=seed)
        for _ in range(16):
            ids = [
                *ids,
                *reference_draft(model, ids, 1),
            ]  # the anchor's own clean row: the target's greedy choice
        answers.append(Sample(ids[:5], ids[5:], "test", 0.0, 0))
    _, hits = replay_outcomes(PackedDrafter(model, 97, "clean_rows"), answers, 4, budgets=(1, 64))
    _, slots = replay_outcomes(PackedDrafter(model, 97, "block"), answers, 4, budgets=(1, 64))
    assert hits.hit_rate[64] == 1.0
    assert (hits.hit_rate[1] or 0) > max(0.7, slots.hit_rate[1] or 0)


def test_counts_of_several_answers_add_up_and_others_do_not() -> None:
    one, other = HitCounts(2, (1, 4)), HitCounts(2, (1, 4))
    outcomes = [Outcome(0, 1), Outcome(2, 5), Outcome(1, 3)]
    for counts, verdict in ((one, Outcome(0, 1)), (one, Outcome(1, 3)), (other, Outcome(1, 9))):
        counts.add_round(verdict.num_accepted, partial(_is_listed, verdict, outcomes, 2))
    whole = total_hits([one, other])
    assert whole.wanted == [1, 2, 0]
    assert whole.hits == {1: [1, 0, 0], 4: [1, 1, 0]}
    assert whole.to_dict()["hit_rate"] == {"1": pytest.approx(1 / 3), "4": pytest.approx(2 / 3)}
    assert HitCounts(2, (1,)).hit_rate == {1: None}
    for parts in ([one, HitCounts(3, (1, 4))], [one, HitCounts(2, (1, 8))], []):
        with pytest.raises(ValueError, match="add up"):
            total_hits(parts)
