"""Embeddings with more rows than the tokenizer has tokens: a row without a token is never chosen
by the target, drafted, or ranked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import d3d
from d3d.errors import InvalidRequest
from d3d.hub.open_model import num_tokens, open_model
from d3d.train.replay import predict_blocks
from support.tiny_model import open_tiny, random_drafter, write_tiny_drafter, write_tiny_target

PADDING = 2
"""Rows without a token in `write_tiny_target`."""


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target whose padded rows have the largest logits half of the time."""
    path = write_tiny_target(tmp_path_factory.mktemp("padded") / "t", tie_word_embeddings=False)
    tensors = load_file(path / "model.safetensors")
    tensors["lm_head.weight"][-PADDING:] *= 100
    save_file(tensors, path / "model.safetensors")
    return path


@pytest.fixture(scope="module")
def drafter(target: Path) -> Path:
    return write_tiny_drafter(target.parent / "d", target)


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "seed": 3}], ids=str)
@pytest.mark.parametrize("engine", ["native", "transformers"])
def test_every_chosen_id_has_a_token(
    target: Path, drafter: Path, engine: str, sampling: dict[str, Any]
) -> None:
    model = d3d.load(str(target), drafter, device="cpu", dtype="float32", engine=engine)
    known = num_tokens(model.tokenizer)
    options = {"max_tokens": 40, "ignore_eos": True, **sampling}
    plain = model.generate("the cat", method="plain", **options)
    assert max(plain.token_ids) < known
    for method in ("serial", "fused", "async") if engine == "native" else ("serial",):
        result = model.generate("the cat", method=method, **options)
        assert result.token_ids == plain.token_ids
        assert result.speculation is not None
        assert not result.speculation.warnings
    with pytest.raises(InvalidRequest, match=f"token id {known} is not in the target's vocabulary"):
        model.generate([known], method="plain")


def test_a_draft_model_without_the_padding_drafts_to_the_end(target: Path, tmp_path: Path) -> None:
    small = write_tiny_target(tmp_path / "small", seed=1)
    tensors = load_file(small / "model.safetensors")
    rows = len(tensors["model.embed_tokens.weight"])
    tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"][:-PADDING].clone()
    save_file(tensors, small / "model.safetensors")
    config = small / "config.json"
    text = config.read_text()
    config.write_text(text.replace(f'"vocab_size": {rows}', f'"vocab_size": {rows - PADDING}'))
    model = d3d.load(str(target), draft_model=str(small), device="cpu", dtype="float32")
    result = model.generate("the cat", max_tokens=30, ignore_eos=True)
    assert result.speculation is not None
    assert result.speculation.mode == "draft_model"
    assert not result.speculation.warnings
    assert result.speculation.undrafted_rounds <= 1, "the answer's last token needs no draft"


def test_replayed_blocks_hold_and_rank_tokens_only(target: Path) -> None:
    base = open_tiny(target)
    model = random_drafter(base)
    text = torch.tensor([7, 20, 33, 46, 59, 72, 85])
    predicted = predict_blocks(model, text, 2, 4, recall=True)
    assert int(predicted.tokens.max()) < num_tokens(base.tokenizer)
    assert predicted.ranks is not None
    assert int(predicted.ranks.max()) < num_tokens(base.tokenizer)
    assert open_model(str(target), dtype="float32").vocab_size == base.config.num_tokens + PADDING
