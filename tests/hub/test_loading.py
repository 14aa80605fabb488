from __future__ import annotations

import json
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from d3d.errors import InvalidCheckpoint
from d3d.hub import names
from d3d.hub.cache import is_converted
from d3d.hub.names import resolve_model
from d3d.hub.open_model import eos_token_ids, load_config, load_tokenizer, read_tensors
from support.tiny_gguf import TinyGguf, write_tiny_gguf

TEXTS = [
    "year 1234567 x  = foo(12)\n\n    return 99",
    "x  12\n    1 + 2",
    "héllo 🎉 日本",
    "  two  spaces ",
    "can't won't . , !",
    "\t\r\n",
]


@pytest.fixture(scope="module")
def tiny() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        eos_token_id=2,
    )
    return LlamaForCausalLM(config)


@pytest.fixture
def single(tiny: LlamaForCausalLM, tmp_path: Path) -> Path:
    tiny.save_pretrained(tmp_path / "single")
    return tmp_path / "single"


@pytest.fixture
def sharded(tiny: LlamaForCausalLM, tmp_path: Path) -> Path:
    tiny.save_pretrained(tmp_path / "sharded", max_shard_size="20KB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 2
    return tmp_path / "sharded"


@pytest.fixture
def gguf(cache: Path, tmp_path: Path) -> TinyGguf:
    return write_tiny_gguf(tmp_path / "tiny.gguf", GGMLQuantizationType.Q8_0)


def shards(directory: Path) -> list[Path]:
    return sorted(directory.glob("*.safetensors"))


def edit_json(file: Path, **changes: object) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


# Tensors


@pytest.mark.parametrize("layout", ["single", "sharded"])
def test_all_tensors_are_read_as_they_were_saved(
    layout: str, tiny: LlamaForCausalLM, request: pytest.FixtureRequest
) -> None:
    tensors = read_tensors(request.getfixturevalue(layout))
    expected = tiny.state_dict()
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensors[name], expected[name]) for name in expected)


def test_a_missing_shard_is_named(sharded: Path) -> None:
    shards(sharded)[1].unlink()
    with pytest.raises(InvalidCheckpoint, match=r"model-00002-of.*missing"):
        read_tensors(sharded)


@pytest.mark.parametrize("keep", [4, 100, -10])
def test_a_file_cut_short_is_named(single: Path, keep: int) -> None:
    file = single / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(InvalidCheckpoint, match=r"model\.safetensors is damaged"):
        read_tensors(single)


def test_a_tensor_that_the_index_lacks_is_named(sharded: Path) -> None:
    index = sharded / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    weight_map.pop("model.norm.weight")
    edit_json(index, weight_map=weight_map)
    with pytest.raises(
        InvalidCheckpoint,
        match=r"names model\.norm\.weight, which model\.safetensors\.index\.json lacks",
    ):
        read_tensors(sharded)


def test_a_tensor_that_its_shard_lacks_is_named(sharded: Path) -> None:
    index = sharded / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    weight_map["model.extra.weight"] = shards(sharded)[0].name
    edit_json(index, weight_map=weight_map)
    with pytest.raises(
        InvalidCheckpoint, match=r"names model\.extra\.weight, which model-00001-of-.* lacks"
    ):
        read_tensors(sharded)


@pytest.mark.parametrize("content", ["{", "[]", "{}"])
def test_a_damaged_index_is_named(sharded: Path, content: str) -> None:
    (sharded / "model.safetensors.index.json").write_text(content)
    with pytest.raises(InvalidCheckpoint, match=r"index\.json"):
        read_tensors(sharded)


def test_weights_of_another_format_are_refused(single: Path) -> None:
    (single / "model.safetensors").rename(single / "pytorch_model.bin")
    with pytest.raises(InvalidCheckpoint, match="only safetensors"):
        read_tensors(single)


# Config, tokenizer, end tokens


def test_a_directory_is_taken_as_it_is(single: Path) -> None:
    assert resolve_model(str(single)) == single
    assert load_config(single).num_hidden_layers == 3


def test_a_damaged_config_is_named(single: Path) -> None:
    for content in ("{", "{}", '{"model_type": "no-such-family"}'):
        (single / "config.json").write_text(content)
        with pytest.raises(InvalidCheckpoint, match=r"config\.json"):
            load_config(single)


def test_a_directory_without_tokenizer_is_refused(single: Path) -> None:
    with pytest.raises(InvalidCheckpoint, match="tokenizer"):
        load_tokenizer(single)


def test_a_damaged_tokenizer_is_refused(gguf: TinyGguf) -> None:
    directory = resolve_model(str(gguf.path))
    (directory / "tokenizer.json").write_text('{"version": "1.0"')
    with pytest.raises(InvalidCheckpoint, match="tokenizer"):
        load_tokenizer(directory)


@pytest.mark.parametrize(("named", "expected"), [([5, 6], {2, 5, 6}), (7, {2, 7}), (None, {2})])
def test_end_tokens_come_from_all_places(
    single: Path, named: object, expected: set[int], byte_tokenizer: PreTrainedTokenizerFast
) -> None:
    byte_tokenizer.eos_token = byte_tokenizer.convert_ids_to_tokens(3)
    edit_json(single / "generation_config.json", eos_token_id=named)
    assert eos_token_ids(single, load_config(single), byte_tokenizer) == expected


def test_the_tokenizers_end_token_counts_where_no_other_is_named(
    single: Path, byte_tokenizer: PreTrainedTokenizerFast
) -> None:
    (single / "generation_config.json").unlink()
    edit_json(single / "config.json", eos_token_id=None)
    assert eos_token_ids(single, load_config(single), byte_tokenizer) == frozenset()
    byte_tokenizer.eos_token = byte_tokenizer.convert_ids_to_tokens(3)
    assert eos_token_ids(single, load_config(single), byte_tokenizer) == {3}


@pytest.fixture
def byte_tokenizer() -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.BPE({text: i for i, text in enumerate(alphabet)}, []))
    )


# Names


def test_an_unknown_name_lists_what_was_tried() -> None:
    with pytest.raises(
        InvalidCheckpoint, match=r"'nonsense'.*smollm2-135m.*no directory.*no hub id"
    ):
        resolve_model("nonsense")


def test_a_missing_gguf_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidCheckpoint, match=r"there is no file .*none\.gguf"):
        resolve_model(str(tmp_path / "none.gguf"))


def test_a_directory_that_holds_a_gguf_file_only_says_so(gguf: TinyGguf) -> None:
    with pytest.raises(
        InvalidCheckpoint, match=r"no config\.json; give the file itself: .*tiny\.gguf"
    ):
        resolve_model(str(gguf.path.parent))


def hub_cache(
    monkeypatch: pytest.MonkeyPatch, directory: Path, model: Path, revision: str = "main"
) -> None:
    """Lay `model` as org/tiny into a hub cache, and allow no network."""
    commit = "a" * 40
    repo = directory / "models--org--tiny"
    shutil.copytree(model, repo / "snapshots" / commit)
    (repo / "refs").mkdir()
    (repo / "refs" / revision).write_text(commit)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(directory))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def test_a_hub_id_is_served_from_the_hub_cache_without_network(
    sharded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (sharded / "tokenizer.json").write_text("{}")
    hub_cache(monkeypatch, tmp_path / "hub", sharded, revision="v2")
    assert len(read_tensors(resolve_model("org/tiny@v2"))) == len(read_tensors(sharded))
    with pytest.raises(InvalidCheckpoint, match="org/tiny@v3"):
        resolve_model("org/tiny@v3")


def test_a_hub_snapshot_that_lacks_a_shard_is_not_taken_for_whole(
    sharded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (sharded / "tokenizer.json").write_text("{}")
    shards(sharded)[0].unlink()
    hub_cache(monkeypatch, tmp_path / "hub", sharded)
    asked: list[str] = []
    original = names.fetch_snapshot.__globals__["snapshot_download"]

    def watch(name: str, **options: object) -> str:
        if not options.get("local_files_only"):
            asked.append(name)
        return str(original(name, **options))

    monkeypatch.setitem(names.fetch_snapshot.__globals__, "snapshot_download", watch)
    with pytest.raises(InvalidCheckpoint, match="missing"):
        read_tensors(resolve_model("org/tiny"))
    assert asked == ["org/tiny"]


def test_a_hub_id_that_cannot_be_had_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(InvalidCheckpoint, match="could not get org/none from the hub"):
        resolve_model("org/none")


def test_a_connection_that_breaks_is_told_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    class RemoteProtocolError(Exception):
        """As the hub's HTTP client has it: neither an OSError nor a ValueError."""

    def snapshot_download(*_: object, local_files_only: bool = False, **__: object) -> str:
        if local_files_only:
            raise FileNotFoundError
        raise RemoteProtocolError("Server disconnected")

    monkeypatch.setattr("d3d.hub.names.snapshot_download", snapshot_download)
    with pytest.raises(
        InvalidCheckpoint, match=r"could not get org/none from the hub.*Server disconnected"
    ):
        resolve_model("org/none")


# GGUF


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        ("F32", torch.float32),
        ("F16", torch.float16),
        ("BF16", torch.bfloat16),
        ("Q8_0", torch.float32),
        ("Q4_1", torch.float32),
    ],
)
def test_a_gguf_file_keeps_every_value_and_no_more_bits_than_needed(
    kind: str, dtype: torch.dtype, cache: Path, tmp_path: Path
) -> None:
    source = write_tiny_gguf(tmp_path / "tiny.gguf", GGMLQuantizationType[kind])
    tensors = read_tensors(resolve_model(str(source.path)))
    assert {tensor.dtype for tensor in tensors.values()} == {dtype}
    for name, values in source.values.items():
        assert torch.equal(tensors[name].float(), torch.from_numpy(values.copy())), name


def test_a_converted_directory_is_a_model_that_transformers_loads(gguf: TinyGguf) -> None:
    directory = resolve_model(str(gguf.path))
    assert "quantization_config" not in json.loads((directory / "config.json").read_text())
    model = AutoModelForCausalLM.from_pretrained(directory)
    assert set(read_tensors(directory)) <= set(model.state_dict())


def test_a_converted_tokenizer_splits_digits_and_gives_text_back(gguf: TinyGguf) -> None:
    tokenizer = load_tokenizer(resolve_model(str(gguf.path)))
    assert tokenizer.tokenize("x  12") == [
        "x",
        "ĠĠ",
        "1",
        "2",
    ]  # GPT-2's rule alone would cut the two spaces apart
    assert [tokenizer.decode(tokenizer.encode(text)) for text in TEXTS] == TEXTS


def test_an_unknown_rule_of_splitting_is_refused(cache: Path, tmp_path: Path) -> None:
    source = write_tiny_gguf(tmp_path / "tiny.gguf", GGMLQuantizationType.F16, pre="martian")
    with pytest.raises(InvalidCheckpoint, match="'martian'"):
        resolve_model(str(source.path))
    assert not list((cache / "converted").glob("[!.]*"))


def test_a_second_start_converts_nothing(
    gguf: TinyGguf, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first = resolve_model(str(gguf.path))
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err == "converting tiny.gguf, once\n"  # and nothing of the libraries' own
    monkeypatch.setattr("d3d.hub.gguf._read_model", None)
    started = time.monotonic()
    assert resolve_model(str(gguf.path)) == first
    assert time.monotonic() - started < 1
    assert capsys.readouterr().err == ""


def test_another_file_of_the_same_name_is_converted_on_its_own(gguf: TinyGguf) -> None:
    first = resolve_model(str(gguf.path))
    write_tiny_gguf(gguf.path, GGMLQuantizationType.F16)
    assert resolve_model(str(gguf.path)) != first


def test_a_damaged_conversion_is_made_again(gguf: TinyGguf) -> None:
    directory = resolve_model(str(gguf.path))
    weights = directory / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    assert len(read_tensors(resolve_model(str(gguf.path)))) == len(gguf.values) + 4


def test_a_cut_gguf_file_is_named_and_leaves_nothing(gguf: TinyGguf, cache: Path) -> None:
    content = gguf.path.read_bytes()
    for keep in (10, 3000, len(content) // 2):
        gguf.path.write_bytes(content[:keep])
        with pytest.raises(InvalidCheckpoint, match=r"tiny\.gguf can't be read"):
            resolve_model(str(gguf.path))
    assert not list((cache / "converted").glob("[!.]*"))


def test_two_conversions_at_once_give_one_whole_directory(gguf: TinyGguf, cache: Path) -> None:
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(resolve_model, [str(gguf.path)] * 2)
    assert first == second
    assert [path.name for path in (cache / "converted").glob("[!.]*")] == [first.name]
    assert is_converted(first, json.loads((first / "d3d_source.json").read_text())["sha256"])


@pytest.mark.real_model
def test_the_real_model_loads_at_once_and_completes_a_sentence(smollm2: Path) -> None:
    started = time.monotonic()
    tensors = read_tensors(smollm2)
    assert time.monotonic() - started < 1
    assert sum(tensor.numel() for tensor in tensors.values()) == 134_515_008
    tokenizer = load_tokenizer(smollm2)
    assert [tokenizer.decode(tokenizer.encode(text)) for text in TEXTS] == TEXTS
    assert eos_token_ids(smollm2, load_config(smollm2), tokenizer) == {2}
    model = AutoModelForCausalLM.from_pretrained(smollm2)
    logits = model(torch.tensor([tokenizer.encode("The capital of France is")])).logits
    assert tokenizer.decode(int(logits[0, -1].argmax())) == " Paris"
