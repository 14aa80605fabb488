from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from d3d.hub.fingerprint import first_difference, tokenizer_fingerprint, weights_fingerprint
from d3d.model.linear import pack_weights
from support.drafters import tiny_drafter


def weights(seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {
        "model.embed_tokens.weight": (97, 64),
        "model.layers.0.mlp.up_proj.weight": (300, 64),
        "model.norm.weight": (64,),
    }
    return {
        name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()
    }


def test_the_same_values_in_a_wider_dtype_are_the_same_weights() -> None:
    assert weights_fingerprint(weights()) == weights_fingerprint(
        {name: tensor.float() for name, tensor in weights().items()}
    )


def test_the_order_of_names_does_not_matter() -> None:
    assert weights_fingerprint(weights()) == weights_fingerprint(dict(reversed(weights().items())))


def test_a_tied_head_saved_or_left_out_is_the_same_but_another_head_is_not() -> None:
    plain = weights()
    tied = {**plain, "lm_head.weight": plain["model.embed_tokens.weight"].clone()}
    assert weights_fingerprint(tied) == weights_fingerprint(plain)
    assert weights_fingerprint(
        {**plain, "lm_head.weight": -tied["lm_head.weight"]}
    ) != weights_fingerprint(plain)


def test_other_values_names_or_shapes_are_other_weights() -> None:
    plain = weights()
    norm = plain["model.norm.weight"]
    changed = [
        weights(seed=1),
        {**plain, "model.norm.weight": norm * 2},
        {**plain, "model.norm.weight": norm.view(8, 8)},
        {
            **{name: tensor for name, tensor in plain.items() if name != "model.norm.weight"},
            "model.other.weight": norm,
        },
        {name: tensor for name, tensor in plain.items() if name != "model.norm.weight"},
        {name: tensor + 0.01 for name, tensor in plain.items()},
    ]
    fingerprints = [weights_fingerprint(item) for item in [plain, *changed]]
    assert len(set(fingerprints)) == len(fingerprints)


def test_a_transposed_view_counts_by_its_values() -> None:
    matrix = torch.randn(50, 30)
    assert weights_fingerprint({"a": matrix.t()}) == weights_fingerprint(
        {"a": matrix.t().contiguous()}
    )


def tokenizer(*texts: str, added: tuple[str, ...] = ()) -> PreTrainedTokenizerFast:
    made = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.BPE({text: i for i, text in enumerate(texts)}, []))
    )
    made.add_tokens(list(added))
    return made


def test_equal_tokenizers_have_no_difference_and_one_fingerprint() -> None:
    a, b = tokenizer("a", "b", "c", added=("<x>",)), tokenizer("a", "b", "c", added=("<x>",))
    assert first_difference(a, b) is None
    assert tokenizer_fingerprint(a) == tokenizer_fingerprint(b)


def test_two_swapped_tokens_of_equal_size_are_named() -> None:
    a, b = tokenizer("a", "b", "c", "d"), tokenizer("a", "b", "d", "c")
    message = first_difference(a, b)
    assert message is not None
    assert "4 and 4 tokens" in message
    assert "token id 2 is 'c' in the first and 'd' in the second" in message
    assert tokenizer_fingerprint(a) != tokenizer_fingerprint(b)


def test_another_size_with_other_tokens_names_both_sizes() -> None:
    message = first_difference(tokenizer("a", "b", "c"), tokenizer("a", "x"))
    assert message is not None
    assert "3 and 2 tokens" in message
    assert "token id 1 is 'b' in the first and 'x' in the second" in message


def test_further_tokens_behind_the_last_are_no_difference() -> None:
    a, b = tokenizer("a", "b", "c"), tokenizer("a", "b", "c", added=("<pad 0>", "<pad 1>"))
    assert first_difference(a, b) is None
    assert first_difference(b, a) is None


def test_an_added_token_at_a_used_id_is_a_difference() -> None:
    message = first_difference(tokenizer("a", "b", added=("<x>",)), {"a": 0, "b": 1, "<y>": 2})
    assert message is not None
    assert "'<x>'" in message
    assert "'<y>'" in message


def test_a_gap_in_the_ids_is_called_unused() -> None:
    assert "unused" in str(first_difference({"a": 0, "c": 2}, {"a": 0, "b": 1, "c": 2}))


@pytest.mark.real_model
def test_the_real_model_is_identified_quickly(smollm2: Path) -> None:
    from d3d.hub.open_model import load_tokenizer, read_tensors

    tensors = read_tensors(smollm2)
    first = weights_fingerprint(tensors)  # reads the file's pages, maybe from disk
    started = time.monotonic()
    assert weights_fingerprint(tensors) == first
    assert time.monotonic() - started < 0.5
    assert first_difference(load_tokenizer(smollm2), load_tokenizer(smollm2)) is None


def test_packed_weights_have_the_same_fingerprint() -> None:
    model = tiny_drafter()
    before = weights_fingerprint(model.trainable())
    pack_weights(model)
    assert model.transformer.head.weight.is_mkldnn
    assert weights_fingerprint(model.trainable()) == before
