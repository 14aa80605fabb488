"""The C pass against the torch decoder, and against itself in other company."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf import GGUFReader
from gguf.quants import dequantize
from numpy.typing import NDArray
from torch import Tensor

from d3d.errors import D3DError
from d3d.model.config import DecoderConfig, decoder_config
from d3d.model.masks.dense import causal
from d3d.model.transformer import Transformer
from d3d.native import build, library
from d3d.native.native_pass import NativePass
from d3d.native.weights import StoredMatrix, Weights, gguf_name, gguf_weights, tensor_weights
from support.tiny import tiny_config, tiny_tensors
from support.tiny_gguf import write_tiny_gguf

pytestmark = pytest.mark.skipif(build.why_not() is not None, reason=str(build.why_not()))

NEAR = 2e-5
"""Largest difference over largest logit."""

ODD: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "sizes that fill no tile": (
        "llama",
        {
            "hidden_size": 42,
            "head_dim": 6,
            "num_attention_heads": 6,
            "num_key_value_heads": 3,
            "intermediate_size": 71,
        },
    ),
    "heads wider than a vector": ("llama", {"head_dim": 80}),
    "untied, biases": (
        "llama",
        {"tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True},
    ),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"tie_word_embeddings": False}),
    "yarn": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
}


def tokens(count: int, vocab_size: int, seed: int = 1) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocab_size, (count,), generator=generator).tolist()


def made(name: str, dtype: torch.dtype = torch.float32) -> tuple[DecoderConfig, dict[str, Tensor]]:
    family, changes = ODD[name]
    shape = tiny_config(family, **changes)
    tensors = {key: each.to(dtype) for key, each in tiny_tensors(shape).items()}
    return decoder_config(shape), tensors


def torch_logits(
    config: DecoderConfig, tensors: dict[str, Tensor], token_ids: list[int], mask: Tensor
) -> Tensor:
    """The torch decoder's logits in float32, [rows, vocab_size]."""
    model = Transformer(config, {name: each.float() for name, each in tensors.items()})
    cache = model.new_cache()
    cache.open(0)
    with torch.inference_mode():
        x = model.embed(torch.tensor([token_ids]))
        positions = torch.arange(len(token_ids))[None]
        return model.logits(model.hidden(x, positions, mask[None], cache.window([0])))[0]


def causal_mask(rows: int) -> Tensor:
    return causal(torch.tensor([0]), rows, rows)[0]


def distance(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).abs().max() / theirs.abs().max())


def run(native: NativePass, token_ids: list[int], width: int, **options: Any) -> Tensor:
    """Logits of a fresh sequence read `width` rows a pass."""
    native.open(99)
    parts = [
        native.forward([99], [token_ids[start : start + width]]).logits
        for start in range(0, len(token_ids), width)
    ]
    native.end(99)
    return torch.cat([part for part in parts if part is not None])


@pytest.fixture(params=build.levels_here())
def level(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("D3D_NATIVE", request.param)
    return str(request.param)


@pytest.mark.parametrize("name", ODD)
def test_logits_are_those_of_the_torch_decoder(level: str, name: str) -> None:
    config, tensors = made(name)
    native = NativePass.from_tensors(tensors, config, threads=2)
    assert native.level == level or level == "generic"
    token_ids = tokens(40, config.vocab_size)
    expected = torch_logits(config, tensors, token_ids, causal_mask(40))
    for rows in (1, 2, 3, 8, 33, 40):
        native.open(1)
        out = native.forward([1], [token_ids[:rows]])
        native.end(1)
        assert out.logits is not None
        assert distance(out.logits, expected[:rows]) < NEAR
        assert out.argmax.tolist() == out.logits.argmax(-1).tolist()
        assert bool(out.finite.all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_weights_are_computed_in_float32(level: str, dtype: torch.dtype) -> None:
    config, tensors = made("sizes that fill no tile", dtype)
    native = NativePass.from_tensors(tensors, config, threads=1)
    token_ids = tokens(9, config.vocab_size)
    expected = torch_logits(config, tensors, token_ids, causal_mask(9))
    assert distance(run(native, token_ids, 9), expected) < NEAR


def random_rows(kind: Kind, rows: int, columns: int, seed: int) -> NDArray[np.uint8]:
    """Random stored rows with small scales, also of formats that gguf can't write."""
    block, size = {
        Kind.Q4_0: (32, 18),
        Kind.Q4_1: (32, 20),
        Kind.Q8_0: (32, 34),
        Kind.Q4_K: (256, 144),
        Kind.Q6_K: (256, 210),
    }[kind]
    rng = np.random.default_rng(seed)
    data = rng.integers(0, 256, (rows, columns // block, size), dtype=np.uint8)
    halves = {Kind.Q4_1: (0, 2), Kind.Q4_K: (0, 2), Kind.Q6_K: (208,)}.get(kind, (0,))
    for at in halves:
        scales = (rng.standard_normal(data.shape[:2]) * 0.003).astype(np.float16)
        data[..., at : at + 2] = scales[..., None].view(np.uint8)
    return data.reshape(rows, -1)


QUANTISED = [Kind.Q4_0, Kind.Q4_1, Kind.Q8_0, Kind.Q4_K, Kind.Q6_K]


@pytest.mark.parametrize("kind", QUANTISED, ids=lambda kind: kind.name)
def test_quantised_weights_are_those_that_gguf_reads(level: str, kind: Kind) -> None:
    shape = tiny_config("llama", hidden_size=256, intermediate_size=256, head_dim=64)
    config = decoder_config(shape)
    tensors = tiny_tensors(shape)
    stored: dict[str, StoredMatrix] = {}
    for seed, (name, tensor) in enumerate(tensors.items()):
        if tensor.dim() == 2:
            data = random_rows(kind, *tensor.shape, seed)
            stored[name] = StoredMatrix(kind.name, *tensor.shape, data)
            tensors[name] = torch.from_numpy(dequantize(data, kind))
    plain = tensor_weights(tensors)
    native = NativePass(config, Weights(stored.__getitem__, plain.vector, plain.has), threads=2)
    token_ids = tokens(7, config.vocab_size)
    ours = run(native, token_ids, 7)
    assert distance(ours, torch_logits(config, tensors, token_ids, causal_mask(7))) < NEAR
    assert torch.equal(ours, run(native, token_ids, 2))


def test_a_gguf_file_is_read_as_it_is(tmp_path: Path) -> None:
    """The rows of its queries and keys are interleaved."""
    path = write_tiny_gguf(tmp_path / "tiny.gguf", Kind.Q8_0).path
    reader = GGUFReader(path)
    shape = tiny_config(
        "llama",
        vocab_size=int(reader.tensors[0].shape[1]),
        hidden_size=64,
        intermediate_size=96,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_hidden_layers=2,
        head_dim=16,
        rms_norm_eps=1e-5,
    )
    config = decoder_config(shape)
    by_name = {tensor.name: tensor for tensor in reader.tensors}
    tensors = {}
    for name, like in tiny_tensors(shape).items():
        found = by_name[gguf_name(name)]
        values = torch.from_numpy(dequantize(found.data, found.tensor_type).copy())
        for part, heads in (("q_proj", 4), ("k_proj", 2)):
            if part in name:
                values = values.view(heads, 8, 2, 64).transpose(1, 2).reshape(-1, 64)
        tensors[name] = values.view(like.shape)
    native = NativePass(config, gguf_weights(path, config), threads=1)
    token_ids = tokens(9, config.vocab_size)
    expected = torch_logits(config, tensors, token_ids, causal_mask(9))
    assert distance(run(native, token_ids, 9), expected) < NEAR


@pytest.mark.parametrize("name", ["sizes that fill no tile", "qwen3"])
def test_bits_do_not_depend_on_rows_threads_or_company(level: str, name: str) -> None:
    config, tensors = made(name)
    token_ids, others = (tokens(48, config.vocab_size, seed) for seed in (1, 2))
    native = NativePass.from_tensors(tensors, config, threads=1)
    expected = run(native, token_ids, 48)
    for threads in (1, 2, 3, 4):
        native.set_threads(threads)
        for width in (1, 2, 3, 6, 16, 24, 37) if threads == 1 else (5, 37):
            assert torch.equal(run(native, token_ids, width), expected), (threads, width)
    native.open(1)
    native.open(2)
    native.forward([2], [others[:5]])
    both = native.forward([2, 1], [others[5:9], token_ids[:31]]).logits
    rest = native.forward([1, 2], [token_ids[31:], others[9:]]).logits
    assert both is not None
    assert rest is not None
    assert torch.equal(torch.cat((both[4:], rest[:17])), expected)
    assert torch.equal(torch.cat((both[:4], rest[17:])), run(native, others, 48)[5:])


def test_a_mask_hides_what_it_says(level: str) -> None:
    config, tensors = made("sizes that fill no tile")
    native = NativePass.from_tensors(tensors, config, threads=2)
    token_ids = tokens(40, config.vocab_size)
    native.open(1)
    explicit = native.forward([1], [token_ids], masks=[causal_mask(40)]).logits
    assert explicit is not None
    assert torch.equal(explicit, run(native, token_ids, 40))
    random = torch.rand(40, 40, generator=torch.Generator().manual_seed(3)) < 0.5
    random |= torch.eye(40, dtype=torch.bool)
    native.crop(1, 0)
    masked = native.forward([1], [token_ids], masks=[random]).logits
    assert masked is not None
    assert distance(masked, torch_logits(config, tensors, token_ids, random)) < NEAR


def test_cropped_and_moved_tokens_leave_no_trace(level: str) -> None:
    config, tensors = made("llama")
    native = NativePass.from_tensors(tensors, config, threads=2)
    token_ids = tokens(30, config.vocab_size)
    expected = run(native, token_ids, 30)
    native.open(1)
    native.forward([1], [token_ids[:10] + [0] * 9])
    native.crop(1, 10)
    # a tree of two branches: of the wrong token and of the right ones
    mask = torch.ones(4, 14, dtype=torch.bool)
    mask[:, 10:] = torch.tensor([[1, 0, 0, 0], [0, 1, 0, 0], [0, 1, 1, 0], [0, 1, 1, 1]])
    places = [[10, 10, 11, 12]]
    tree = native.forward([1], [[0, *token_ids[10:13]]], masks=[mask], positions=places).logits
    native.keep(1, 10, [11, 12, 13])
    rest = native.forward([1], [token_ids[13:]]).logits
    assert tree is not None
    assert rest is not None
    assert torch.equal(torch.cat((tree[1:], rest)), expected[10:])


def test_only_wanted_rows_have_logits() -> None:
    config, tensors = made("llama")
    native = NativePass.from_tensors(tensors, config, threads=2)
    token_ids = tokens(12, config.vocab_size)
    expected = run(native, token_ids, 12)
    native.open(1)
    some = native.forward([1], [token_ids], wanted=[11, 3])
    assert some.logits is not None
    assert torch.equal(some.logits, expected[[11, 3]])
    native.crop(1, 0)
    best = native.forward([1], [token_ids], with_logits=False)
    assert best.logits is None
    assert best.argmax.tolist() == expected.argmax(-1).tolist()
    native.crop(1, 0)
    assert native.forward([1], [token_ids], wanted=[]).argmax.tolist() == []


def test_weights_that_are_not_finite_are_noticed() -> None:
    config, tensors = made("llama")
    tensors["model.norm.weight"][3] = float("nan")
    native = NativePass.from_tensors(tensors, config, threads=1)
    native.open(1)
    assert native.forward([1], [[1, 2]]).finite.tolist() == [False, False]


def test_a_hidden_number_that_is_not_finite_is_never_multiplied() -> None:
    config, tensors = made("llama")
    token_ids = tokens(6, config.vocab_size - 1)
    spoilt = config.vocab_size - 1
    native = NativePass.from_tensors(tensors, config, threads=1)
    expected = run(native, token_ids, 6)
    tensors["model.embed_tokens.weight"][spoilt] = float("nan")
    native = NativePass.from_tensors(tensors, config, threads=1)
    native.open(1)
    native.forward([1], [[spoilt] * 8])
    native.crop(1, 0)
    mask = causal_mask(7)
    mask[1:, 0] = False
    out = native.forward(
        [1], [[spoilt, *token_ids]], masks=[mask], positions=[[0, *range(6)]]
    ).logits
    assert out is not None
    assert torch.equal(out[1:, :spoilt], expected[:, :spoilt])


def test_a_model_that_does_not_fit_is_refused_in_one_line() -> None:
    config, tensors = made("llama")
    wrong = {**tensors, "model.norm.weight": torch.ones(3)}
    with pytest.raises(D3DError, match=r"model\.norm does not have the size"):
        NativePass.from_tensors(wrong, config)
    wrong = {**tensors, "model.embed_tokens.weight": torch.ones(8, 8, dtype=torch.int8)}
    with pytest.raises(D3DError, match=r"holds torch\.int8, which has no C kernel"):
        NativePass.from_tensors(wrong, config)
    tensors.pop("model.layers.1.mlp.up_proj.weight")
    with pytest.raises(D3DError, match=r"up_proj\.weight is missing"):
        NativePass.from_tensors(tensors, config)


def test_impossible_passes_are_refused() -> None:
    config, tensors = made("llama")
    native = NativePass.from_tensors(tensors, config, threads=1)
    native.open(1)
    for token_ids in ([], [config.vocab_size], [-1]):
        with pytest.raises(ValueError, match="impossible argument"):
            native.forward([1], [token_ids])
    with pytest.raises(ValueError, match="twice"):
        native.forward([1, 1], [[1], [2]])
    with pytest.raises(ValueError, match="the mask must be bool"):
        native.forward([1], [[1]], masks=[torch.ones(2, 2, dtype=torch.bool)])
    assert native.length(1) == 0


def test_a_forked_child_starts_threads_of_its_own() -> None:
    import os

    config, tensors = made("llama")
    native = NativePass.from_tensors(tensors, config, threads=3)
    token_ids = tokens(5, config.vocab_size)
    expected = run(native, token_ids, 5)
    child = os.fork()
    if child == 0:
        os._exit(0 if torch.equal(run(native, token_ids, 5), expected) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert torch.equal(run(native, token_ids, 2), expected)


def test_memory_that_is_not_there_is_an_error() -> None:
    config, tensors = made("llama")
    native = NativePass.from_tensors(tensors, config, threads=1)
    with pytest.raises(MemoryError, match="out of memory for a sequence"):
        native.open(1, capacity=2**31 - 64)


def test_the_constants_are_those_of_the_header() -> None:
    header = (build.SOURCES / "d3d.h").read_text()
    assert f"#define D3D_VERSION {library.VERSION}" in header
    assert ", ".join(f"D3D_{name}" for name in library.FORMATS) in header
