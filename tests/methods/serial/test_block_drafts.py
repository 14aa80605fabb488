"""D3D's own drafter in the loop: trained or not, it never changes the answer, and its cache stays
consistent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from d3d.engine.drafter import Draft
from d3d.engine.request import Request
from d3d.methods.serial.drafter import BlockDrafter
from d3d.model.drafter import Alignment, DeltaConfig, DrafterConfig
from d3d.model.from_target import from_target
from d3d.target.native import NativeTarget
from support.doubles import noisy
from support.runs import PROMPT, SAMPLING, Run, make, run, run_all
from support.tiny import tiny_transformer

PROMPTS = ([5, 17, 80, 3, 41], [60], [9] * 33, [4, 8, 15, 16, 23, 42])
WAYS = ("greedy", "temperature", "greedy penalties", "top_p")
LIMITS = (70, 90, 64, 81)


def drafter(
    target: NativeTarget,
    kind: str,
    alignment: Alignment = "next",
    attention: Any = "causal",
    *,
    steps: int = 1,
    **options: Any,
) -> BlockDrafter:
    """`kind`: untrained (deltas that do nothing yet), random (deltas that do anything), full
    (random weights of its own)."""
    delta = None if kind == "full" else DeltaConfig(rank=4)
    layers = tuple(range(target.model.config.num_layers))
    fields = {
        "block_size": 6,
        "kept_layers": layers,
        "delta": delta,
        "alignment": alignment,
        "block_attention": attention,
        **options,
    }
    model = from_target(target.model, DrafterConfig(**fields))
    generator = torch.Generator().manual_seed(1)
    if kind != "untrained":
        with torch.no_grad():
            for parameter in model.trainable().values():
                parameter += (
                    0.3
                    * parameter.std().nan_to_num().clamp(min=0.1)
                    * torch.randn(parameter.shape, generator=generator)
                )
    return BlockDrafter(model, target.vocab_size, num_denoise_steps=steps)


def requests(target: NativeTarget) -> list[Run]:
    return [
        make(target, prompt, **{**SAMPLING[way], "max_tokens": limit})
        for way, (prompt, limit) in (
            (way, pair) for way in WAYS for pair in zip(PROMPTS, LIMITS, strict=True)
        )
    ]


@pytest.fixture(scope="module")
def plain(target: NativeTarget) -> list[list[int]]:
    return [run_all(target, None, [one])[0].ids for one in requests(target)]


@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("kind", ["untrained", "random", "full"])
@pytest.mark.parametrize("attention", ["causal", "bidirectional"])
@pytest.mark.parametrize("alignment", ["next", "same"])
def test_ids_equal_plain(
    target: NativeTarget,
    plain: list[list[int]],
    alignment: Alignment,
    attention: str,
    kind: str,
    steps: int,
) -> None:
    together = run_all(
        target, drafter(target, kind, alignment, attention, steps=steps), requests(target), 6
    )
    assert [one.ids for one in together] == plain
    assert sum(len(one.rounds) for one in together) > 200
    assert not any(one.faults for one in together)
    assert all(stats.draft_length == 6 for one in together for stats in one.rounds[:-8])
    assert any(stats.num_accepted for one in together for stats in one.rounds)


def test_ids_equal_plain_with_a_reserved_mask_token_and_fewer_layers(
    target: NativeTarget, plain: list[list[int]]
) -> None:
    drafted = run_all(
        target, drafter(target, "full", mask_token_id=96, kept_layers=(1,)), requests(target), 6
    )
    assert [one.ids for one in drafted] == plain


def test_one_request_alone(target: NativeTarget) -> None:
    for sampling in ("greedy", "temperature"):
        params = SAMPLING[sampling] | {"max_tokens": 230}
        expected = run(target, **params)
        drafted = run(target, drafter(target, "full"), **params)
        assert drafted.ids == expected.ids
        assert sum(stats.draft_length > 0 for stats in drafted.rounds) > 100


def test_the_target_itself_as_drafter_is_always_right_about_the_next_token(
    target: NativeTarget,
) -> None:
    drafted = run(target, drafter(target, "random"), max_tokens=60)
    assert all(stats.num_accepted >= 1 for stats in drafted.rounds if stats.draft_length)


class Compared(BlockDrafter):
    """A drafter that spoils some drafts, and checks that a drafter without a past would have
    drafted the same."""

    num_drafts = 0

    def propose(self, requests: Sequence[Request]) -> list[Draft]:
        drafts = super().propose(requests)
        held = [request for request in requests if request.id in self._cache]
        assert all(self._cache.length(request.id) <= len(request) for request in held)
        assert drafts == BlockDrafter(self.model, 97).propose(requests)
        self.num_drafts += 1
        assert self.num_drafts < 200
        if self.num_drafts % 3 == 0:
            return [Draft(tuple((token + 1) % 97 for token in draft.token_ids)) for draft in drafts]
        return drafts


@pytest.mark.parametrize("attention", ["causal", "bidirectional"])
@pytest.mark.parametrize("alignment", ["next", "same"])
def test_what_was_rejected_leaves_no_trace_in_the_drafter(
    target: NativeTarget, plain: list[list[int]], alignment: Alignment, attention: str
) -> None:
    model = drafter(target, "random", alignment, attention).model
    together = run_all(target, Compared(model, 97), requests(target), 6)
    assert not [one.faults for one in together if one.faults], (
        "a failed comparison shows as a fault"
    )
    assert [one.ids for one in together] == plain


@pytest.mark.parametrize("context", [16, 40])
def test_past_the_drafters_context_decoding_goes_on_plainly(
    target: NativeTarget, plain: list[list[int]], context: int
) -> None:
    small = NativeTarget(tiny_transformer(max_position_embeddings=context))
    together = run_all(target, drafter(small, "full"), requests(target), 6)
    assert [one.ids for one in together] == plain
    for one in together:
        assert one.faults == []
        length = one.request.prompt_length + 1
        for stats in one.rounds:
            assert stats.draft_length <= max(0, context - length)
            length += stats.num_committed
    assert any(stats.draft_length for one in together for stats in one.rounds)


def test_numbers_that_are_not_finite_end_drafting_for_their_own_request_only(
    make_target: Any,
) -> None:
    target = make_target(tie_word_embeddings=False)
    broken = drafter(target, "full")
    bad = 77
    with torch.no_grad():
        broken.model.transformer.embedding[bad] = float("nan")
    prompts = [[5, bad, *[80] * 18], [60] * 9, [23] * 20, [4, 8, 15]]
    limits = (20, 12, 50, 60)  # the last, a short one, moves to the first's place

    def all_four() -> list[Run]:
        return [
            make(target, prompt, max_tokens=limit, logit_bias={bad: -100.0})
            for prompt, limit in zip(prompts, limits, strict=True)
        ]

    expected = [run_all(target, None, [one])[0].ids for one in all_four()]
    together = run_all(target, broken, all_four(), 6)
    assert [one.ids for one in together] == expected
    assert [len(one.faults) for one in together] == [1, 0, 0, 0]
    assert "not finite" in together[0].faults[0]
    assert all(stats.draft_length == 0 for stats in together[0].rounds)
    for one, single in zip(together[1:], all_four()[1:], strict=True):
        run_all(target, broken, [single], 6)
        assert [stats[:3] for stats in one.rounds] == [stats[:3] for stats in single.rounds]


def test_a_drafter_with_wholly_broken_weights_costs_one_round(target: NativeTarget) -> None:
    broken = drafter(target, "full")
    with torch.no_grad():
        broken.model.transformer.norm.weight.fill_(float("nan"))
    drafted = run(target, broken, max_tokens=20)
    assert drafted.ids == run(target, max_tokens=20).ids
    assert [event.fault is None for event in drafted.events] == [True, False] + [True] * 18


def test_turning_drafting_off_and_on_again(target: NativeTarget) -> None:
    """A fresh loop over a sequence that is under way drafts what a loop from the start would have
    drafted."""
    whole = run(target, drafter(target, "random"), max_tokens=60)
    spoiled = noisy(0.5, 1, 4, [whole.token_ids], target.vocab_size)
    first = run(target, spoiled, max_tokens=25)
    assert PROMPT + whole.ids[:25] == first.token_ids
    rest = run(target, drafter(target, "random"), first.token_ids, max_tokens=35)
    assert first.ids + rest.ids == whole.ids
