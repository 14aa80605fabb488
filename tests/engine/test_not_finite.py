"""Logits that are NaN or infinite: never a token, always an error of the one request that has
them."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from d3d.engine.drafter import Draft
from d3d.engine.engine import Engine
from d3d.engine.request import Request
from d3d.engine.sampling import LogitRows, SamplingParams, sample_match
from d3d.errors import NotFinite
from d3d.methods.fused.engine import FusedTarget
from d3d.target.native import NativeTarget
from d3d.target.transformers import open_transformers
from support.doubles import Double, scripted
from support.runs import PROMPT, SAMPLING, Run, make, run_all
from support.tiny import tiny_transformer
from support.tiny_model import open_tiny, random_drafter, write_tiny_target

SPOILT = 60
"""Token whose embedding is NaN; it is in no prompt and no answer unless a test puts it there."""


def poisoned(token_id: int = SPOILT) -> NativeTarget:
    model = tiny_transformer(tie_word_embeddings=False)
    model.embedding.data[token_id] = math.nan
    return NativeTarget(model)


def tried(target: NativeTarget, runs: list[Run], drafter: Double | None = None) -> None:
    """Decode to the end, whatever fails, and check that nothing is kept."""
    engine = Engine(target, drafter)
    for one in runs:
        engine.add(one.request)
    while engine.has_work:
        engine.step()
    assert target.num_held == 0


@pytest.mark.parametrize("way", SAMPLING)
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_no_way_of_choosing_takes_a_token_from_such_logits(way: str, value: float) -> None:
    logits = torch.zeros(3, 97)
    logits[:, 5], logits[2, 33], logits[:, 40:] = 9.0, value, -math.inf
    request = make(NativeTarget(tiny_transformer()), logprobs=2, **SAMPLING[way]).request
    for row in (0, 1):
        assert sample_match(LogitRows(logits[row : row + 1]), (), request).bonus_token is not None
    with pytest.raises(NotFinite, match="in the prefill, for the token at position 5"):
        sample_match(LogitRows(logits[2:]), (), request)


def test_such_a_row_counts_only_if_the_draft_before_it_is_kept() -> None:
    logits = torch.zeros(3, 97)
    logits[0, 5], logits[1, 6], logits[2] = 1.0, 1.0, math.nan
    for params in (SamplingParams(), SamplingParams(temperature=1e-3, seed=0)):
        request = Request(PROMPT, params)
        assert sample_match(LogitRows(logits), (5, 7), request).token_ids == (5, 6)
        with pytest.raises(NotFinite, match="position 7"):
            sample_match(LogitRows(logits), (5, 6), request)


@pytest.mark.parametrize("way", ["greedy", "hot", "bias"])
def test_one_request_of_a_batch_fails_and_the_others_go_on(way: str) -> None:
    target = poisoned()
    prompts = [PROMPT, [1, SPOILT, 2], [9] * 30]
    alone = [make(target, prompt, max_tokens=9, **SAMPLING[way]) for prompt in prompts]
    together = [make(target, prompt, max_tokens=9, **SAMPLING[way]) for prompt in prompts]
    for one in alone:
        tried(target, [one])
    tried(target, together)
    assert [one.ids for one in together] == [one.ids for one in alone]
    assert [len(one.ids) for one in together] == [9, 0, 9]
    error = together[1].request.error
    assert isinstance(error, NotFinite)
    assert "(embedding)" in str(error), "the weight at fault"


def test_a_failure_after_some_tokens_names_the_verify_pass() -> None:
    target = poisoned()
    bad, good = make(target, max_tokens=9, logit_bias={SPOILT: 1e6}), make(target, max_tokens=9)
    tried(target, [bad, good])
    assert bad.ids == [SPOILT]
    assert "in the verify pass, for the token at position 6" in str(bad.request.error)
    assert len(good.ids) == 9


@pytest.mark.parametrize("token_id", [SPOILT, 0])
def test_hidden_rows_of_drafts_and_padding_cost_only_time(token_id: int) -> None:
    """0 fills the rows of a shorter draft."""
    target = poisoned(token_id)
    never = {"logit_bias": {token_id: -1e6}, "max_tokens": 12}
    prompts = [PROMPT, [9] * 30, [4, 8]]
    plain = [make(target, prompt, **never) for prompt in prompts]
    for one in plain:
        tried(target, [one])
    assert all(len(one.ids) == 12 for one in plain)

    def propose(request: Request, length: int, number: int) -> Draft:
        return Draft((3, SPOILT, 5)[: min(length, (number + len(request)) % 4)])

    drafted = [make(target, prompt, **never) for prompt in prompts]
    tried(target, drafted, Double(3, propose))
    assert [one.ids for one in drafted] == [one.ids for one in plain]
    one = make(target, **never)
    tried(target, [one], scripted(3, [(token_id,)] * 12))
    assert one.ids == plain[0].ids


def test_numbers_that_outgrow_the_dtype_are_laid_to_the_layer() -> None:
    model = tiny_transformer()
    model.layers[1].down.weight.data *= 1e38  # type: ignore[operator,union-attr]
    with pytest.raises(NotFinite, match=r"weights are finite, and layers\.1 is the first"):
        run_all(NativeTarget(model), None, [make(NativeTarget(model))])
    model.to(torch.bfloat16)
    with pytest.raises(NotFinite, match="too large for bfloat16; use --dtype float32"):
        run_all(NativeTarget(model), None, [make(NativeTarget(model))])


def test_a_fused_pass_that_fails_fails_its_request_alone(tmp_path: Path) -> None:
    base = open_tiny(write_tiny_target(tmp_path / "t", tie_word_embeddings=False))
    base.transformer.embedding.data[SPOILT] = math.nan
    fused = FusedTarget(NativeTarget(base.transformer), random_drafter(base), 5, 12)
    runs = [make(fused, max_tokens=9), make(fused, max_tokens=9, logit_bias={SPOILT: 1e6})]
    engine = Engine(fused, fused)
    for one in runs:
        engine.add(one.request)
    while engine.has_work:
        engine.step()
    assert [len(one.ids) for one in runs] == [9, 1]
    assert isinstance(runs[1].request.error, NotFinite)
    assert fused.num_held == 0


def test_the_transformers_engine_says_so_when_it_opens_the_model(tmp_path: Path) -> None:
    path = write_tiny_target(tmp_path / "t")
    weights = load_file(path / "model.safetensors")
    weights["model.layers.1.mlp.down_proj.weight"][3, 4] = math.nan
    save_file(weights, path / "model.safetensors")
    with pytest.raises(NotFinite, match=r"layers\.1\.mlp\.down_proj\.weight"):
        open_transformers(str(path), dtype="float32")
