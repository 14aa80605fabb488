"""A difference is a mistake unless the target itself was undecided there."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from d3d.engine.choice_gap import choice_gap
from d3d.engine.request import Request
from d3d.engine.sampling import SamplingParams
from d3d.lab.bench.lossless import Divergence, compare, label, summarise, tolerance
from d3d.model.config import decoder_config
from d3d.model.transformer import Transformer
from d3d.target.native import NativeTarget
from support.runs import PROMPT, SAMPLING, run
from support.tiny import tiny_config, tiny_tensors

LENGTH = 20


@pytest.fixture(scope="module")
def target() -> NativeTarget:
    """Rows 30 and 31 of its head are the same, so their logits always are."""
    config = tiny_config(tie_word_embeddings=False)
    tensors = tiny_tensors(config)
    tensors["lm_head.weight"][31] = tensors["lm_head.weight"][30]
    return NativeTarget(Transformer(decoder_config(config), tensors).eval())


def compared(
    target: NativeTarget, one: list[int], other: list[int], **params: Any
) -> Divergence | None:
    return compare(target, PROMPT, (one, other), SamplingParams(**params))


def swapped(ids: list[int], position: int, token_id: int) -> list[int]:
    return [*ids[:position], token_id, *ids[position + 1 :]]


@pytest.mark.parametrize("sampling", ["greedy", "temperature"])
def test_equal_answers_do_not_diverge(target: NativeTarget, sampling: str) -> None:
    ids = run(target, max_tokens=LENGTH, **SAMPLING[sampling]).ids
    assert compared(target, ids, list(ids), **SAMPLING[sampling]) is None
    assert label(None) == "yes"


@pytest.mark.parametrize("position", [0, 7, LENGTH - 1])
@pytest.mark.parametrize("sampling", SAMPLING)
def test_another_token_is_a_mistake(target: NativeTarget, sampling: str, position: int) -> None:
    params = SAMPLING[sampling]
    ids = run(target, max_tokens=LENGTH, **params).ids
    wrong = swapped(ids, position, (ids[position] + 48) % target.vocab_size)
    for pair in ((ids, wrong), (wrong, ids)):
        found = compared(target, *pair, **params)
        assert found is not None
        assert (found.position, found.is_rounding) == (position, False)
        assert found.gap > 1e-4
        assert label(found) == "no"


def test_the_gap_is_what_the_other_token_lacks(target: NativeTarget) -> None:
    ids = run(target, max_tokens=LENGTH).ids
    logits = NativeTarget(target.model).forward([0], [PROMPT + ids[:4]], last_only=True)[0].logits()
    order = logits[0].argsort(descending=True).tolist()
    for rank in (1, 2, 50):
        found = compared(target, ids, swapped(ids, 4, order[rank]))
        assert found is not None
        best, other = float(logits[0, order[0]]), float(logits[0, order[rank]])
        assert found.gap == pytest.approx((best - other) / max(1.0, abs(best)), rel=1e-4)


@pytest.mark.parametrize("params", [{}, {"repetition_penalty": 1.1, "frequency_penalty": 0.1}])
def test_two_equal_rows_of_the_head_make_a_tie(
    target: NativeTarget, params: dict[str, Any]
) -> None:
    params = params | {"logit_bias": {30: 50.0, 31: 50.0}}
    ids = run(target, max_tokens=LENGTH, **params).ids
    assert set(ids) <= {30, 31}
    found = compared(target, ids, swapped(ids, 0, 61 - ids[0]), **params)
    assert found is not None
    assert (found.position, found.is_rounding) == (0, True)
    assert found.gap == pytest.approx(0.0, abs=1e-6)
    assert label(found).startswith("rounding (position 0, gap ")
    # Being undecided between two tokens is no excuse for a third.
    found = compared(target, ids, swapped(ids, 0, 5), **params)
    assert found is not None
    assert not found.is_rounding


def test_a_sample_on_the_border_may_fall_on_the_neighbour_only(target: NativeTarget) -> None:
    params = {"temperature": 1.0, "seed": 7}
    logits = NativeTarget(target.model).forward([0], [PROMPT], last_only=True)[0].logits()
    request = Request(PROMPT, SamplingParams(**params), seed=7)
    ids = run(target, max_tokens=3, **params).ids
    gaps = {token: choice_gap(logits, request, token) for token in range(target.vocab_size)}
    nearest = choice_gap(logits, request)
    assert 0 < ids[0] < target.vocab_size - 1, "the test needs a neighbour on both sides"
    assert gaps.pop(ids[0]) == 0.0
    assert min(gaps.values()) == pytest.approx(nearest)
    neighbour = min(gaps, key=lambda token: gaps[token])
    assert abs(neighbour - ids[0]) == 1
    for token, is_rounding in ((neighbour, True), ((ids[0] + 50) % 97, False)):
        found = compare(
            target,
            PROMPT,
            (ids, [token]),
            SamplingParams(**params),
            largest_rounding=nearest * 1.001,
        )
        assert found is not None
        assert found.is_rounding is is_rounding


def test_an_impossible_token_is_infinitely_far(target: NativeTarget) -> None:
    ids = run(target, max_tokens=3, temperature=1.0, top_k=1, seed=1).ids
    found = compared(
        target, ids, swapped(ids, 1, (ids[1] + 1) % 97), temperature=1.0, top_k=1, seed=1
    )
    assert found == Divergence(1, math.inf, False)


def test_min_tokens_is_heeded(target: NativeTarget) -> None:
    params = SamplingParams(min_tokens=3)
    ids = run(target, max_tokens=3).ids
    eos = (ids[1] + 1) % 97
    found = compare(target, PROMPT, (ids, [ids[0], eos]), params, eos_token_ids=frozenset({eos}))
    assert found == Divergence(1, math.inf, False)


def test_an_answer_that_ends_early_is_a_mistake(target: NativeTarget) -> None:
    ids = run(target, max_tokens=LENGTH).ids
    for pair in ((ids, ids[:5]), (ids[:5], ids)):
        assert compared(target, *pair) == Divergence(5, math.inf, False)
    assert compared(target, [], ids) == Divergence(0, math.inf, False)


def test_sampling_without_a_seed_can_not_be_compared(target: NativeTarget) -> None:
    with pytest.raises(ValueError, match="seed"):
        compared(target, [1], [2], temperature=1.0)


def test_a_label_names_position_and_gap() -> None:
    assert label(Divergence(17, 0.000034, True)) == "rounding (position 17, gap 3.4e-05)"


def test_lower_precision_has_a_larger_tolerance() -> None:
    assert (
        tolerance(torch.float32)
        == 1e-4
        < tolerance(torch.float16)
        < tolerance(torch.bfloat16)
        == 2**-5
    )
    with pytest.raises(ValueError, match="float64"):
        tolerance(torch.float64)


def test_the_worst_of_several_comparisons_is_told() -> None:
    rounding, mistake = Divergence(3, 1e-6, True), Divergence(9, 0.5, False)
    assert summarise([]) == summarise([None, None]) == "yes"
    assert summarise([None, rounding, None]) == label(rounding)
    assert summarise([rounding, mistake, None]) == "no"
