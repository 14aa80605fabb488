"""The target's best logits, recorded while it writes, are those of the rows from which its tokens
were chosen."""

from __future__ import annotations

import pytest
import torch

from d3d.target.native import NativeTarget
from d3d.train.top_logits import TopLogitsRecorder
from support.runs import make, run_all
from support.tiny import tiny_transformer

PROMPTS = [[5, 6, 7], [8], [9, 10, 11, 12, 13], [14, 15]]


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_each_answer_token_has_the_row_that_it_was_chosen_from(temperature: float) -> None:
    target, recorder = NativeTarget(tiny_transformer(seed=1)), TopLogitsRecorder(5)
    for _ in range(2):  # the second time starts from nothing
        runs = [
            make(target, prompt, temperature=temperature, seed=1, max_tokens=4 + 3 * row)
            for row, prompt in enumerate(PROMPTS)
        ]
        run_all(target, None, runs, accept=recorder)
        recorded = [recorder.recorded(run.request) for run in runs]
    for run, (ids, log_probs) in zip(runs, recorded, strict=True):
        count = len(run.ids)
        assert (ids.shape, ids.dtype) == ((count, 5), torch.int32)
        assert (log_probs.shape, log_probs.dtype) == ((count, 5), torch.float16)
        (whole,) = NativeTarget(target.model).forward([0], [run.token_ids])
        rows = whole.logits()[-count - 1 : -1].log_softmax(-1)
        torch.testing.assert_close(log_probs.float(), rows.topk(5).values, atol=2e-2, rtol=2e-3)
        torch.testing.assert_close(
            rows.gather(1, ids.long()), rows.topk(5).values, atol=1e-4, rtol=1e-4
        )
        if temperature == 0.0:
            assert ids[:, 0].tolist() == run.ids


def test_more_logits_than_there_are_tokens_are_all_of_them() -> None:
    target, recorder = NativeTarget(tiny_transformer(seed=1)), TopLogitsRecorder(500)
    run = make(target, [3, 4], max_tokens=2)
    run_all(target, None, [run], accept=recorder)
    found = recorder.recorded(run.request)
    assert found.log_probs.shape == (2, 97)
    torch.testing.assert_close(
        found.log_probs.float().exp().sum(-1), torch.ones(2), atol=1e-2, rtol=1e-2
    )
