"""Draft trees: whatever tree is proposed, the answer is plain decoding's, and the target's cache
holds what a fresh prefill of the answer would."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from d3d.engine.drafter import NO_DRAFT, Draft, Drafter, guarded
from d3d.engine.engine import Engine
from d3d.engine.metrics import acceptance_rate
from d3d.engine.request import Request
from d3d.engine.round import Round
from d3d.engine.sampling import LogitRows, SamplingParams, TokenCounts, sample_match
from d3d.target.native import NativeTarget
from support.doubles import Double
from support.drafters import text
from support.runs import SAMPLING, Run, make, run, run_all

DEPTH, NODES = 4, 9


@pytest.fixture
def target(target: NativeTarget) -> NativeTarget:
    """One that holds nothing yet."""
    return NativeTarget(target.model)


class Trees(Drafter):
    """Proposes random trees: the right tokens somewhere in them, wrong ones, equal siblings."""

    max_draft_length = DEPTH
    max_nodes = NODES  # type: ignore[assignment] - a constant here

    def __init__(self, answers: Sequence[Sequence[int]], seed: int = 0) -> None:
        self.answers, self.random = [list(answer) for answer in answers], random.Random(seed)
        self.num_trees = 0

    def propose(self, requests: Sequence[Request]) -> list[Draft]:
        return [self._tree(request) for request in requests]

    def _tree(self, request: Request) -> Draft:
        committed, chance = len(request), self.random
        known = (each for each in self.answers if each[:committed] == request.token_ids)
        coming = next(known, [])[committed:]
        room = request.draft_room(DEPTH)
        tokens: list[int] = []
        parents: list[int] = []
        depths: list[int] = []
        for _ in range(chance.randint(1, NODES)):
            parent = chance.choice(
                [-1, *(node for node, depth in enumerate(depths) if depth < room)]
            )
            depth = depths[parent] + 1 if parent >= 0 else 1
            is_right = depth <= len(coming) and chance.random() < 0.6
            tokens.append(coming[depth - 1] if is_right else chance.randrange(97))
            parents.append(parent)
            depths.append(depth)
        self.num_trees += len(set(parents)) < len(parents)
        return Draft(tuple(tokens), parents=tuple(parents)) if room else NO_DRAFT


def plain_answers(target: NativeTarget, prompts: list[list[int]], **params: Any) -> list[Run]:
    return [run(target, None, prompt, **params) for prompt in prompts]


@pytest.mark.parametrize("settings", SAMPLING)
def test_any_tree_gives_the_plain_answers(target: NativeTarget, settings: str) -> None:
    """Three requests at once, with all that a row's parameters may depend on."""
    params = {**SAMPLING[settings], "max_tokens": 40, "logprobs": 2, "min_tokens": 20}
    prompts = [text(4 + 3 * index, seed=index) for index in range(3)]
    plain = plain_answers(target, prompts, **params, eos={9})
    drafter = Trees([one.token_ids for one in plain])
    runs = run_all(target, drafter, [make(target, each, **params, eos={9}) for each in prompts])
    for one, expected in zip(runs, plain, strict=True):
        assert one.ids == expected.ids
        for ours, theirs in zip(one.logprobs, expected.logprobs, strict=True):
            assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-3)
    rounds = [round_ for one in runs for round_ in one.rounds]
    assert drafter.num_trees
    assert any(round_.num_accepted > 1 for round_ in rounds)
    assert any(round_.num_branched for round_ in rounds)
    for round_ in rounds:
        assert round_.num_accepted <= round_.draft_length <= min(DEPTH, round_.num_nodes)
        assert round_.num_nodes <= NODES
        assert Round.from_json(round_.to_json()).num_nodes == round_.num_nodes
    accepted = sum(round_.num_accepted for round_ in rounds)
    drafted = sum(round_.num_nodes for round_ in rounds)
    assert acceptance_rate(rounds) == accepted / drafted


def test_requests_join_and_leave_between_trees_and_the_cache_is_a_fresh_prefills(
    target: NativeTarget,
) -> None:
    prompts = [text(4 + 3 * index, seed=index) for index in range(4)]
    plain = plain_answers(target, prompts, max_tokens=30)
    engine = Engine(target, Trees([one.token_ids for one in plain], seed=1))
    requests = [make(target, each, max_tokens=30).request for each in prompts]
    for number in range(200):
        if number < len(requests):
            engine.add(requests[number])
        if number == 5:
            engine.cancel(requests[1])
        engine.step()
        for request in engine.running:
            assert_cache_is_fresh(target, request)
        if not engine.has_work and number >= len(requests):
            break
    for request, one in zip(requests, plain, strict=True):
        assert request.answer_ids == one.ids[: request.num_answer_tokens]
    assert [request.finish_reason for request in requests].count("length") == 3
    assert target.num_held == engine.drafter.num_held == 0


def assert_cache_is_fresh(target: NativeTarget, request: Request) -> None:
    length = len(request) - 1
    assert target.cache.length(request.id) == length
    fresh = NativeTarget(target.model)
    fresh.forward([0], [request.token_ids[:-1]])
    place = target.cache.ids.index(request.id)
    for ours, theirs in (
        (target.cache.keys, fresh.cache.keys),
        (target.cache.values, fresh.cache.values),
    ):
        torch.testing.assert_close(
            ours[:, place, :, :length], theirs[:, 0, :, :length], rtol=1e-4, atol=1e-4
        )


def test_each_path_of_a_tree_has_the_logits_of_its_own_chain(target: NativeTarget) -> None:
    """Beside a longer sequence with a chain, whose rows must be its own too."""
    tree = Draft((5, 6, 7, 6, 8), parents=(-1, -1, 0, 1, 2))
    paths = {0: (), 1: (5,), 2: (6,), 3: (5, 7), 4: (6, 6), 5: (5, 7, 8)}
    first, other = make(target, text(6)).request, make(target, text(11, seed=2)).request
    requests, chain = [first, other], Draft((1, 2, 3))
    target.prefill(requests, 100)
    target.rewind(requests)
    rows, beside = target.verify(requests, [tree, chain])
    for row, path in paths.items():
        alone = NativeTarget(target.model).forward([0], [[*first.token_ids, *path]], last_only=True)
        torch.testing.assert_close(rows.raw[row], alone[0].raw[0], rtol=1e-4, atol=1e-4)
    alone = NativeTarget(target.model).forward([0], [[*other.token_ids, 1, 2, 3]])
    torch.testing.assert_close(beside.raw, alone[0].raw[-4:], rtol=1e-4, atol=1e-4)


def test_a_row_is_penalised_for_its_ancestors_only() -> None:
    """Token 1 is best everywhere, until the answer holds it; then token 2."""
    logits = torch.tensor([[0.0, 5.0, 4.0, 3.0]]).repeat(4, 1)
    request = Request([0], SamplingParams(frequency_penalty=1.5, logprobs=0))
    request.counts = TokenCounts([0], 4, torch.device("cpu"))
    verdict = sample_match(LogitRows(logits), (2, 1, 2), request, (-1, -1, 1))
    assert (verdict.accepted, verdict.path, verdict.bonus_token) == ((1, 2), (1, 2), 1)
    assert len(verdict.logprobs) == 3


def tree(*parents: int) -> Draft:
    return Draft(tuple(range(len(parents))), parents=parents)


@pytest.mark.parametrize("parents", [(0,), (-1, 1), (-2, 0), (-1,), (-1, -1, 5), (-1, 0.0)])
def test_a_malformed_tree_ends_drafting_for_its_request(
    target: NativeTarget, parents: tuple[int, ...]
) -> None:
    draft = Draft((1, 2), parents=parents)
    one = run(target, Double(4, lambda *_: draft), max_tokens=6)
    assert one.ids == run(target, max_tokens=6).ids
    assert len(one.faults) == 1
    assert "malformed tree" in one.faults[0]


@pytest.mark.parametrize(
    ("draft", "trees", "max_tokens", "token_ids", "parents"),
    [
        (tree(-1, -1, 0, 1, 2), True, 20, (0, 1, 2, 3), (-1, -1, 0, 1)),
        (tree(-1, -1, 0, 1, 2), False, 20, (0, 2), None),
        (tree(-1, -1, 1, 2), True, 3, (0, 1, 2), (-1, -1, 1)),
        (tree(-1, 0, 1, 1), True, 20, (0, 1, 2, 3), (-1, 0, 1, 1)),
        (tree(-1, 0, 1), True, 20, (0, 1, 2), None),
        (tree(-1, -1), True, 1, (), None),
    ],
    ids=["too many", "no trees", "too deep", "fits", "a chain", "no room"],
)
def test_a_tree_is_cut_to_what_can_be_verified(
    draft: Draft,
    trees: bool,
    max_tokens: int,
    token_ids: tuple[int, ...],
    parents: tuple[int, ...] | None,
) -> None:
    """The drafter may propose four tokens, three deep; what is left is a tree again."""
    request = Request([1, 2], SamplingParams(max_tokens=max_tokens))
    guard = guarded(Double(4, lambda *_: draft), 97, trees=trees)
    (cut,) = guard.propose([request])
    assert (cut.token_ids, cut.parents) == (token_ids, parents)


def test_a_target_that_verifies_chains_only_gets_the_first_path(target: NativeTarget) -> None:
    target.verifies_trees = False
    answer = run(target, max_tokens=20)
    one = run(target, Trees([answer.token_ids]), max_tokens=20)
    assert one.ids == answer.ids
    assert not any(round_.num_branched for round_ in one.rounds)
