"""Skipped drafter passes: prompt lookup copies a draft from the text, and if few drafted tokens are
kept, only every eighth round drafts. No answer changes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from d3d.engine.drafter import Draft
from d3d.engine.request import Request
from d3d.methods.serial.drafter import PROBE_INTERVAL, BlockDrafter, DraftHistory
from d3d.model.drafter import DrafterModel
from d3d.target.native import NativeTarget
from support.drafters import grow, request, text, tiny_drafter
from support.runs import PROMPT, SAMPLING, make, run_all
from support.tiny import tiny_transformer


class Nines:
    """Stands in for the denoiser: proposes nines, and notes what it is asked for."""

    def __init__(self) -> None:
        self.asked: list[list[tuple[list[int], int]]] = []

    def draft(
        self, ids: Sequence[int], texts: Sequence[list[int]], lengths: Sequence[int]
    ) -> list[Draft]:
        self.asked.append(list(zip(map(list, texts), lengths, strict=True)))
        return [Draft((9,) * length) for length in lengths]


@pytest.fixture(scope="module")
def model() -> DrafterModel:
    return tiny_drafter()


def drafter_of_nines(model: DrafterModel, **options: Any) -> tuple[BlockDrafter, Nines]:
    drafter, nines = BlockDrafter(model, 97, **options), Nines()
    drafter._denoiser = nines  # type: ignore[assignment]
    return drafter, nines


# Prompt lookup first


def test_a_text_goes_on_as_it_did_and_the_model_is_not_asked(model: DrafterModel) -> None:
    drafter, nines = drafter_of_nines(model, lookup=2)
    drafts = drafter.propose([request([1, 2, 3, 4, 5, 1, 2], room=3)])
    assert drafts == [Draft((3, 4, 5), looked_up=True)]
    assert nines.asked == []


def test_a_shorter_run_than_wanted_is_left_to_the_model(model: DrafterModel) -> None:
    for shortest, expected in ((2, (3, 4)), (3, (9, 9)), (0, (9, 9))):
        drafter, _ = drafter_of_nines(model, lookup=shortest)
        (draft,) = drafter.propose([request([1, 2, 3, 4, 5, 1, 2], room=2)])
        assert draft.token_ids == expected
        assert draft.looked_up == (shortest == 2)


def test_in_a_batch_the_model_is_asked_for_the_others_alone(model: DrafterModel) -> None:
    drafter, nines = drafter_of_nines(model, lookup=2)
    repeats, new = request([1, 2, 3, 1, 2], room=2), request([5, 6, 7], room=3)
    drafts = drafter.propose([repeats, new])
    assert [draft.token_ids for draft in drafts] == [(3, 1), (9, 9, 9)]
    assert nines.asked == [[([5, 6, 7], 3)]]
    drafter.end(repeats)
    grow(new, [5, 6])
    other = request([8, 8], room=1)
    drafts = drafter.propose([new, other])
    assert [draft.token_ids for draft in drafts] == [(7, 5, 6), (9,)], "each has its own past"
    assert nines.asked[1:] == [[([8, 8], 1)]]


def test_a_copy_is_no_longer_than_a_draft_may_be(model: DrafterModel) -> None:
    drafter, _ = drafter_of_nines(model, lookup=1, draft_length=4)
    (draft,) = drafter.propose([request([3, 3, 3])])
    assert draft.token_ids == (3, 3, 3, 3)


# Pauses


def lengths_of(drafter: BlockDrafter, one: Request, committed: list[int], count: int) -> list[int]:
    """Lengths of so many drafts, behind each of which the text grows by `committed`."""
    lengths = []
    for _ in range(count):
        (draft,) = drafter.propose([one])
        lengths.append(len(draft.token_ids))
        grow(one, committed)
    return lengths


def test_drafts_that_are_never_kept_are_made_in_every_eighth_round(model: DrafterModel) -> None:
    drafter, nines = drafter_of_nines(model, draft_length=4, least_kept=0.8)
    lengths = lengths_of(drafter, request([1, 2, 3]), [1], 60)
    first = lengths.index(0)
    assert 1 < first < 10, "a few failures are no reason yet"
    lap, rest = divmod(60 - first, PROBE_INTERVAL)
    assert lengths[first:] == ([0] * (PROBE_INTERVAL - 1) + [4]) * lap + [0] * rest
    assert len(nines.asked) == sum(length > 0 for length in lengths), "a pause spares the model"


def test_drafts_that_are_kept_come_back(model: DrafterModel) -> None:
    drafter, _ = drafter_of_nines(model, draft_length=4, least_kept=0.8)
    one = request([1, 2, 3])
    lengths_of(drafter, one, [1], 40)
    lengths = lengths_of(drafter, one, [9, 9, 9, 9, 1], 40)
    assert lengths.index(4) < PROBE_INTERVAL
    assert lengths[-20:] == [4] * 20


def test_whether_one_kept_token_is_enough_hangs_on_the_threshold(model: DrafterModel) -> None:
    drafter, _ = drafter_of_nines(model, draft_length=4, least_kept=0.8)
    assert lengths_of(drafter, request([1]), [9, 1], 30) == [4] * 30
    drafter, _ = drafter_of_nines(model, draft_length=4, least_kept=1.5)
    assert 0 in lengths_of(drafter, request([1]), [9, 1], 30)
    drafter, _ = drafter_of_nines(model, draft_length=4)
    assert lengths_of(drafter, request([1]), [1], 30) == [4] * 30, "0 never pauses"


def test_nothing_pauses_before_there_was_a_draft(model: DrafterModel) -> None:
    drafter, _ = drafter_of_nines(model, draft_length=4, least_kept=7.0)
    pause = [0] * (PROBE_INTERVAL - 1)
    assert lengths_of(drafter, request([1]), [1], 10) == [4, *pause, 4, 0]


def test_a_round_without_room_is_no_pause(model: DrafterModel) -> None:
    drafter, nines = drafter_of_nines(model, draft_length=4, least_kept=7.0)
    assert lengths_of(drafter, request([1], room=0), [1], 20) == [0] * 20
    assert nines.asked == []
    history = next(iter(drafter._histories.values()))
    assert history.paused == 0


@pytest.mark.parametrize(
    ("draft", "later", "kept"),
    [
        ((5, 6, 7), [5, 6, 8], 2),
        ((5, 6), [5, 6, 7], 2),
        ((5, 6), [7], 0),
        ((), [7], 0),
        ((5, 6), [5, 6, 7, 8, 9, 9], 2),
        ((5, 6), [5], 1),
    ],
)
def test_what_a_draft_came_to_is_read_off_the_text(
    draft: tuple[int, ...], later: list[int], kept: int
) -> None:
    history = DraftHistory(0.0)
    before = history.kept.value
    history.begin_draft(draft, 3)
    history.look([1, 2, 3, *later])
    assert history.kept.value == pytest.approx(0.8 * before + 0.2 * kept)
    history.look([1, 2, 3, *later, 4])
    assert history.kept.value == pytest.approx(0.8 * before + 0.2 * kept), "once"


def test_each_request_has_pauses_of_its_own(model: DrafterModel) -> None:
    drafter, nines = drafter_of_nines(model, draft_length=4, least_kept=0.8)
    good, bad = request([1]), request([2])
    for _ in range(20):
        drafter.propose([bad, good])
        grow(bad, [1])
        grow(good, [9, 9, 9, 9, 1])
    firsts = [[token_ids[0] for token_ids, _ in asked] for asked in nines.asked]
    assert [1] in firsts
    assert [2] not in firsts
    drafter.end(bad)
    drafts = drafter.propose([good, request([3])])
    assert [len(draft.token_ids) for draft in drafts] == [4, 4]


# Answers


@pytest.mark.parametrize("shared", [True, False], ids=["beside the target", "alone"])
@pytest.mark.parametrize("params", SAMPLING.values(), ids=SAMPLING.keys())
def test_with_lookup_the_answer_stays_the_targets_own(params: dict[str, Any], shared: bool) -> None:
    base = tiny_transformer(seed=1, scale=0.3)
    engine = NativeTarget(base)
    prompts = [PROMPT * 4, text(8, 1), PROMPT * 2]
    found = _as_plain(engine, prompts, params, shared, lookup=3)
    rounds = [stats for one in found for stats in one.rounds]
    assert any(stats.looked_up and stats.num_accepted for stats in rounds)
    assert any(not stats.looked_up and stats.draft_length for stats in rounds)


@pytest.mark.parametrize("shared", [True, False], ids=["beside the target", "alone"])
@pytest.mark.parametrize("params", SAMPLING.values(), ids=SAMPLING.keys())
def test_with_pauses_the_answer_stays_the_targets_own(params: dict[str, Any], shared: bool) -> None:
    engine = NativeTarget(tiny_transformer(seed=1))
    prompts = [text(8, seed) for seed in range(3)]
    paused = _as_plain(engine, prompts, params, shared, least_kept=2.5)
    assert any(stats.draft_length == 0 for one in paused for stats in one.rounds[:-6])
    assert any(stats.draft_length for one in paused for stats in one.rounds)


@pytest.mark.parametrize("shared", [True, False], ids=["beside the target", "alone"])
def test_all_of_them_together(shared: bool) -> None:
    engine = NativeTarget(tiny_transformer(seed=1, scale=0.3))
    prompts = [PROMPT * 4, text(8, 1), PROMPT * 2, text(30, 2)]
    options = {"lookup": 2, "least_kept": 1.5, "draft_confidence": 0.1}
    for params in SAMPLING.values():
        _as_plain(engine, prompts, params, shared, **options)


def _as_plain(
    engine: NativeTarget, prompts: list[list[int]], params: Any, shared: bool, **options: Any
) -> list[Any]:
    """Their runs, with the ids that plain decoding gives."""
    plain = [make(engine, prompt, max_tokens=40, **params) for prompt in prompts]
    runs = [make(engine, prompt, max_tokens=40, **params) for prompt in prompts]
    model = tiny_drafter(engine.model, scope="slots" if shared else None)
    cache = engine.cache_for(model)
    assert (cache is not None) == shared
    drafter = BlockDrafter(model, 97, draft_length=5, shared_cache=cache, **options)
    run_all(engine, None, plain)
    run_all(engine, drafter, runs, max_batch=2)
    assert [one.ids for one in runs] == [one.ids for one in plain]
    assert not any(one.faults for one in runs)
    return runs
