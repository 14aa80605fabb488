"""The decoder against `transformers`, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from d3d.errors import InvalidCheckpoint
from d3d.hub.open_model import load_config, load_tokenizer, read_tensors
from d3d.model.config import decoder_config
from d3d.model.kv_cache import Window
from d3d.model.masks.dense import causal
from d3d.model.transformer import Transformer
from support.tiny import tiny_config, tiny_tensors, tiny_transformer

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
QWEN25_YARN = {
    "type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}  # as Qwen2.5's model card has it
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama, untied head": ("llama", {"tie_word_embeddings": False, "num_hidden_layers": 3}),
    "llama, as many kv heads as heads": ("llama", {"num_key_value_heads": 4}),
    "llama, biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, attention bias only": ("llama", {"attention_bias": True}),
    "llama, head_dim not hidden / heads": ("llama", {"head_dim": 32}),
    "llama, head_dim not given": ("llama", {"head_dim": None}),
    "llama 3 rope": ("llama", {"rope_parameters": LLAMA3_ROPE}),
    "linear rope": (
        "llama",
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}},
    ),
    "old linear rope": (
        "llama",
        {"rope_scaling": {"type": "linear", "factor": 4.0}, "rope_theta": 5000.0},
    ),
    "qwen2": ("qwen2", {}),
    "qwen2, untied head, large theta": (
        "qwen2",
        {"tie_word_embeddings": False, "rope_theta": 1000000.0},
    ),
    "qwen2, yarn": ("qwen2", {"rope_scaling": QWEN25_YARN, "rope_theta": 1000000.0}),
    "qwen2, window switched off": (
        "qwen2",
        {"use_sliding_window": False, "sliding_window": 8, "max_window_layers": 1},
    ),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "qwen3, attention bias": ("qwen3", {"attention_bias": True}),
    "qwen3, yarn": (
        "qwen3",
        {
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
}


def through_json(family: str, overrides: dict[str, Any], directory: Path) -> PretrainedConfig:
    """The config as AutoConfig reads it from a config.json that has exactly these fields (old-style
    ones too)."""
    fields = tiny_config(family).to_dict()
    if not overrides.keys().isdisjoint(("rope_scaling", "rope_theta")):
        fields.pop("rope_parameters")
    for name in ("layer_types", "transformers_version"):
        fields.pop(name, None)
    (directory / "config.json").write_text(json.dumps({**fields, **overrides}))
    return AutoConfig.from_pretrained(directory)


def reference(config: PretrainedConfig, tensors: dict[str, Tensor]) -> Any:
    model = AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    missing = model.load_state_dict(tensors, strict=False)
    assert not missing.unexpected_keys
    assert set(missing.missing_keys) <= {"lm_head.weight"}
    model.tie_weights()
    return model


def opened(model: Transformer, batch: int, capacity: int) -> Window:
    """A cache of so many empty sequences."""
    cache = model.new_cache()
    for sequence_id in range(batch):
        cache.open(sequence_id, capacity)
    return cache.window(range(batch))


def full_logits(model: Transformer, token_ids: Tensor) -> Tensor:
    batch, rows = token_ids.shape
    window = opened(model, batch, rows)
    positions = torch.arange(rows)[None]
    mask = causal(torch.zeros(batch, dtype=torch.long), rows, rows)
    return model.logits(model.hidden(model.embed(token_ids), positions, mask, window))


def next_logits(model: Transformer, window: Window, token_ids: Tensor) -> Tensor:
    """One pass over rows that all sequences have, behind what the cache holds."""
    starts = torch.tensor(window.lengths)
    rows = token_ids.shape[1]
    mask = causal(starts, rows, window.num_keys(rows))
    hidden = model.hidden(
        model.embed(token_ids), starts[:, None] + torch.arange(rows), mask, window
    )
    window.advance([rows] * len(starts))
    return model.logits(hidden)


@pytest.mark.parametrize("variant", VARIANTS)
@torch.no_grad()
def test_logits_equal_those_of_transformers(variant: str, tmp_path: Path) -> None:
    config = through_json(*VARIANTS[variant], tmp_path)
    tensors = tiny_tensors(config, seed=3)
    model = Transformer(decoder_config(config), tensors).eval()
    token_ids = torch.randint(
        0, 97, (2, 150), generator=torch.Generator().manual_seed(1)
    )  # past 64 positions, so rope scaling tells
    expected = reference(config, tensors)(token_ids).logits
    torch.testing.assert_close(full_logits(model, token_ids), expected, atol=1e-4, rtol=1e-4)
    window = opened(model, 2, 150)
    steps = [
        next_logits(model, window, part) for part in token_ids.split([100, 1, 1, 30, 1, 17], dim=1)
    ]
    torch.testing.assert_close(torch.cat(steps, dim=1), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    "variant", ["llama, biases", "llama 3 rope", "old linear rope", "qwen2, yarn", "qwen3"]
)
def test_each_variant_makes_a_difference(variant: str, tmp_path: Path) -> None:
    """Else the test above could not see a variant that is ignored."""
    family, overrides = VARIANTS[variant]
    plain = (
        {name: value for name, value in overrides.items() if name == "head_dim"}
        if family == "qwen3"
        else {}
    )
    tensors = tiny_tensors(through_json(family, overrides, tmp_path), seed=3)
    token_ids = torch.randint(0, 97, (1, 150), generator=torch.Generator().manual_seed(1))
    logits = full_logits(
        Transformer(decoder_config(through_json(family, overrides, tmp_path)), tensors), token_ids
    )
    if family == "qwen3":
        tensors = {
            name: torch.ones_like(t) if "q_norm" in name or "k_norm" in name else t
            for name, t in tensors.items()
        }
    elif "biases" in variant:
        tensors = {
            name: torch.zeros_like(t) if name.endswith(".bias") else t
            for name, t in tensors.items()
        }
    config = through_json(family, overrides if "biases" in variant else plain, tmp_path)
    other = full_logits(Transformer(decoder_config(config), tensors), token_ids)
    assert (logits - other).abs().max() > 0.01


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@torch.no_grad()
def test_rows_of_different_length_equal_each_sequence_alone(family: str) -> None:
    model = tiny_transformer(family, seed=5)
    generator = torch.Generator().manual_seed(2)
    texts = [torch.randint(0, 97, (length,), generator=generator) for length in (23, 4, 11)]
    window = opened(model, 3, 60)
    for pieces in ([9, 1, 4], [1, 3, 0], [13, 0, 7]):
        done = list(window.lengths)
        parts = [
            text[start : start + count]
            for text, start, count in zip(texts, done, pieces, strict=True)
        ]
        rows = max(pieces)
        padded = torch.stack(
            [torch.nn.functional.pad(part, (0, rows - len(part)), value=96) for part in parts]
        )
        starts = torch.tensor(done)
        hidden = model.hidden(
            model.embed(padded),
            starts[:, None] + torch.arange(rows),
            causal(starts, rows, window.num_keys(rows)),
            window,
        )
        window.advance(pieces)
        for i, text in enumerate(texts):
            alone = full_logits(model, text[None])[0, done[i] : done[i] + pieces[i]]
            torch.testing.assert_close(
                model.logits(hidden[i, : pieces[i]]), alone, atol=1e-4, rtol=1e-4
            )


@pytest.mark.parametrize("kept", [(0,), (0, 2), (1, 2, 3)])
@torch.no_grad()
def test_kept_layers_equal_a_model_that_has_only_these(kept: tuple[int, ...]) -> None:
    config = tiny_config("qwen3", num_hidden_layers=4)
    tensors = tiny_tensors(config)
    renamed = {
        name: tensor for name, tensor in tensors.items() if not name.startswith("model.layers.")
    }
    for place, layer in enumerate(kept):
        prefix = f"model.layers.{layer}."
        renamed.update(
            {
                f"model.layers.{place}.{n.removeprefix(prefix)}": t
                for n, t in tensors.items()
                if n.startswith(prefix)
            }
        )
    small = tiny_config("qwen3", num_hidden_layers=len(kept))
    token_ids = torch.arange(20)[None]
    model = Transformer(decoder_config(config), tensors, layers=kept)
    expected = reference(small, renamed)(token_ids).logits
    torch.testing.assert_close(full_logits(model, token_ids), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@torch.no_grad()
def test_bfloat16_stays_near_float32(family: str) -> None:
    config = tiny_config(family)
    tensors = tiny_tensors(config, scale=0.5)
    token_ids = torch.arange(60)[None]
    exact = full_logits(Transformer(decoder_config(config), tensors), token_ids)
    model = Transformer(
        decoder_config(config), {name: tensor.bfloat16() for name, tensor in tensors.items()}
    )
    assert model.dtype == torch.bfloat16
    rounded = full_logits(model, token_ids)
    assert rounded.dtype == torch.bfloat16
    assert (rounded.float() - exact).abs().mean() < 0.02 * exact.std()


def test_a_tied_head_is_the_embedding_and_needs_no_tensor_of_its_own() -> None:
    model = tiny_transformer()
    assert model.head.weight is model.embedding
    config = tiny_config()
    tensors = tiny_tensors(config)
    doubled = Transformer(
        decoder_config(config),
        {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].clone()},
    )
    assert doubled.head.weight is doubled.embedding


def test_logits_keep_the_shape_of_the_hidden_states() -> None:
    model = tiny_transformer()
    for shape in ((64,), (3, 64), (2, 3, 64)):
        assert model.logits(torch.zeros(shape)).shape == (*shape[:-1], 97)


def test_head_size_heads_and_context_are_read_from_the_config(tmp_path: Path) -> None:
    assert decoder_config(through_json("llama", {"head_dim": None}, tmp_path)).head_dim == 16
    assert decoder_config(through_json("qwen3", {"head_dim": 32}, tmp_path)).head_dim == 32
    config = decoder_config(
        through_json(
            "llama", {"num_key_value_heads": None, "max_position_embeddings": 40}, tmp_path
        )
    )
    assert (config.num_kv_heads, config.max_length, config.tied) == (4, 40, True)


# What is refused


@pytest.mark.parametrize(
    ("family", "overrides", "message"),
    [
        (
            "qwen2",
            {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
            "sliding-window",
        ),
        ("qwen3", {"layer_types": ["full_attention", "sliding_attention"]}, "sliding-window"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
            "rotary variant 'dynamic'",
        ),
        ("llama", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rotary variant 'dynamic'"),
        ("llama", {"hidden_act": "gelu"}, "activation 'gelu'"),
        ("llama", {"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantised"),
        (
            "llama",
            {"num_attention_heads": 4, "num_key_value_heads": 3},
            "4 query heads can't share 3",
        ),
    ],
)
def test_a_config_that_would_be_computed_wrongly_is_refused(
    family: str, overrides: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(InvalidCheckpoint, match=message):
        decoder_config(through_json(family, overrides, tmp_path))


def test_a_rotary_variant_of_another_family_is_refused() -> None:
    factors = {
        "short_factor": [1.0] * 8,
        "long_factor": [2.0] * 8,
        "original_max_position_embeddings": 64,
    }
    config = tiny_config(
        rope_parameters={"rope_type": "longrope", "rope_theta": 1e4, "factor": 8.0, **factors}
    )
    with pytest.raises(
        InvalidCheckpoint,
        match="'longrope' is not supported; supported: default, linear, llama3, yarn",
    ):
        decoder_config(config)


@pytest.mark.parametrize("family", ["mistral", "gpt2"])
def test_another_family_is_refused_by_name(family: str) -> None:
    with pytest.raises(
        InvalidCheckpoint,
        match=f"'{family}' is not supported; supported families: llama, qwen2, qwen3",
    ):
        decoder_config(AutoConfig.for_model(family))


def build(family: str, tensors: dict[str, Tensor], **overrides: Any) -> Transformer:
    return Transformer(decoder_config(tiny_config(family, **overrides)), tensors)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_every_missing_tensor_is_named(family: str) -> None:
    tensors = tiny_tensors(tiny_config(family, tie_word_embeddings=False))
    for name in tensors:
        rest = {other: tensor for other, tensor in tensors.items() if other != name}
        with pytest.raises(InvalidCheckpoint, match=rf"tensor {name} is missing"):
            build(family, rest, tie_word_embeddings=False)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_every_tensor_of_a_wrong_shape_is_named_with_both_shapes(family: str) -> None:
    tensors = tiny_tensors(tiny_config(family, tie_word_embeddings=False))
    for name, tensor in tensors.items():
        wrong = torch.cat((tensor, tensor[:1]))
        with pytest.raises(InvalidCheckpoint) as error:
            build(family, {**tensors, name: wrong}, tie_word_embeddings=False)
        assert (
            f"{name} has shape {tuple(wrong.shape)}, the config says {tuple(tensor.shape)}"
            in str(error.value)
        )


def test_transposed_weights_are_refused() -> None:
    tensors = tiny_tensors(tiny_config())
    name = "model.layers.1.mlp.down_proj.weight"
    with pytest.raises(InvalidCheckpoint, match=name):
        build("llama", {**tensors, name: tensors[name].T})


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.self_attn.q_proj.bias",  # the config has none: transformers would ignore it
        "model.layers.0.self_attn.q_norm.weight",  # another family's
        "model.layers.2.mlp.up_proj.weight",  # a layer more than the config has
        "model.layers.0.mlp.up_proj.weight_scale",
        "model.vision.weight",
    ],
)
def test_a_tensor_that_nothing_reads_is_refused_by_name(name: str) -> None:
    tensors = tiny_tensors(tiny_config())
    with pytest.raises(InvalidCheckpoint, match=f"1 tensors .* for example {name}"):
        build("llama", {**tensors, name: torch.zeros(64)})


def test_stored_rotary_frequencies_are_no_leftover() -> None:
    build(
        "llama",
        {
            **tiny_tensors(tiny_config()),
            "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8),
        },
    )


def test_a_head_that_differs_from_the_embedding_it_is_tied_to_is_refused() -> None:
    tensors = tiny_tensors(tiny_config())
    with pytest.raises(InvalidCheckpoint, match=r"lm_head\.weight differs"):
        build("llama", {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"] + 1})


@pytest.mark.parametrize(
    "name",
    ["model.embed_tokens.weight", "model.layers.0.self_attn.k_proj.weight", "model.norm.weight"],
)
def test_weights_that_are_not_floats_are_refused(name: str) -> None:
    tensors = tiny_tensors(tiny_config())
    with pytest.raises(InvalidCheckpoint, match=rf"{name} holds torch\.int8, not floats"):
        build("llama", {**tensors, name: tensors[name].to(torch.int8)})


@pytest.mark.real_model
@torch.no_grad()
def test_the_real_model_equals_transformers(smollm2: Path) -> None:
    tokenizer = load_tokenizer(smollm2)
    token_ids = torch.tensor(
        [
            tokenizer.encode(
                "A train leaves at 9:40 and arrives at 11:05. How long does it take?\n\ndef f(x):"
            )
        ]
    )
    expected = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)(token_ids).logits
    config = decoder_config(load_config(smollm2))
    model = Transformer(
        config, {name: tensor.float() for name, tensor in read_tensors(smollm2).items()}
    )
    torch.testing.assert_close(full_logits(model, token_ids), expected, atol=1e-4, rtol=1e-4)
