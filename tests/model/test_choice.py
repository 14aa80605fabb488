"""What a drafter chooses in each place."""

from __future__ import annotations

import pytest
import torch

from d3d.model.choice import FOLDS, best_few, best_of, joined

LOGITS = torch.randn(2, 3, 11, generator=torch.Generator().manual_seed(0))


def test_the_best_token_of_each_row_and_its_probability() -> None:
    chosen = best_of(LOGITS, None, logprobs=True)
    assert torch.equal(chosen.token_ids, LOGITS.argmax(-1))
    assert torch.equal(chosen.best, LOGITS.amax(-1))
    assert chosen.logprobs is not None
    assert torch.allclose(chosen.logprobs.exp(), LOGITS.softmax(-1).amax(-1))
    assert best_of(LOGITS, None, logprobs=False).logprobs is None


def test_logits_of_a_few_tokens_give_those_tokens() -> None:
    for_all, of_each = torch.arange(100, 111), torch.randint(0, 500, LOGITS.shape)
    assert torch.equal(best_of(LOGITS, for_all, logprobs=False).token_ids, 100 + LOGITS.argmax(-1))
    index = LOGITS.argmax(-1, keepdim=True)
    assert torch.equal(
        best_of(LOGITS, of_each, logprobs=False).token_ids, of_each.gather(-1, index)[..., 0]
    )


@pytest.mark.parametrize(
    "tokens", [3, 40, FOLDS * 16 - 1, FOLDS * 16, FOLDS * 16 + 1, FOLDS * 30 + 17]
)
@pytest.mark.parametrize("first", [0, 1])
def test_the_best_few_are_those_of_a_sort(tokens: int, first: int) -> None:
    generator = torch.Generator().manual_seed(tokens)
    logits = (
        torch.stack([torch.randperm(tokens, generator=generator) for _ in range(6)])
        .view(2, 3, tokens)
        .float()
    )
    logits[0, 1, 0] = float("-inf")
    values, indices = best_few(logits[:, first:], 4)
    ranked = logits[:, first:].sort(descending=True)
    assert torch.equal(values, ranked.values[..., :4])
    assert torch.equal(indices, ranked.indices[..., :4])


def test_the_best_few_of_what_is_not_finite_are_not_finite() -> None:
    logits = torch.zeros(1, FOLDS * 20)
    logits[0, 77] = float("nan")
    assert best_few(logits, 4)[0].isnan().any()
    assert best_few(torch.full((1, FOLDS * 20), float("-inf")), 4)[0].isneginf().all()


def test_parts_of_a_draft_join() -> None:
    whole = best_of(LOGITS, None, logprobs=True)
    parts = joined(
        best_of(LOGITS[:, :1], None, logprobs=True), best_of(LOGITS[:, 1:], None, logprobs=True)
    )
    for one, other in zip(whole, parts, strict=True):
        assert one is not None
        assert other is not None
        assert torch.equal(one, other)
    assert joined(whole, best_of(LOGITS, None, logprobs=False)).logprobs is None
