"""An exported drafter is a plain model that transformers loads, and that computes what the drafter
does if its deltas act on every row."""

from __future__ import annotations

import json
import shutil
import stat
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from d3d.errors import InvalidCheckpoint, InvalidRequest
from d3d.hub.checkpoint import save_drafter
from d3d.hub.export import MASK_TOKEN, Exported, export_drafter
from d3d.hub.open_drafter import load_drafter
from d3d.hub.open_model import OpenModel, open_model
from d3d.methods.serial.drafter import BlockDrafter
from d3d.model.drafter import DeltaConfig, DrafterModel
from d3d.model.kv_cache import PassThrough
from support.drafters import request
from support.tiny_model import open_tiny, random_drafter, write_tiny_target

TEXT = [5, 17, 80, 3, 41, 200, 7]
SLOTS = 5


def no_spare_rows(target: Path) -> Path:
    """Its tokenizer has a token for every row; the last two are reserved ones."""
    tokenizer = AutoTokenizer.from_pretrained(target)
    tokenizer.add_tokens(["<|reserved_0|>", "<|reserved_1|>"], special_tokens=True)
    tokenizer.save_pretrained(target)
    return target


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return no_spare_rows(write_tiny_target(tmp_path_factory.mktemp("full") / "target"))


def saved(base: OpenModel, path: Path, **kind: Any) -> DrafterModel:
    """Save a drafter at `path` and load it, with its deltas on every row."""
    save_drafter(path, random_drafter(base, **kind), base, storage="float32")
    model = load_drafter(path, base)
    if model.config.delta is not None:
        model.config = model.config.model_copy(
            update={"delta": model.config.delta.model_copy(update={"scope": "all"})}
        )
    return model


@torch.no_grad()
def our_logits(model: DrafterModel) -> Tensor:
    """Logits of every row: the text, then masked slots."""
    ids = torch.tensor([TEXT + [-1] * SLOTS])
    rows = ids.shape[1]
    causal = torch.ones(rows, rows, dtype=torch.bool).tril()[None]
    hidden = model.transformer.hidden(
        model.embed(ids),
        torch.arange(rows)[None],
        causal,
        PassThrough(),
        model.delta_rows(rows, SLOTS),
    )
    return model.transformer.logits(hidden)[0]


def load(path: Path) -> Any:
    model, found = AutoModelForCausalLM.from_pretrained(
        path, local_files_only=True, output_loading_info=True
    )
    assert not any(found.values()), found
    return model.eval()


@torch.no_grad()
def their_logits(exported: Exported) -> Tensor:
    ids = torch.tensor([TEXT + [exported.mask_token_id] * SLOTS])
    logits: Tensor = load(exported.path)(input_ids=ids, use_cache=False).logits[0]
    return logits.float()


KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "llama, deltas at slots": ({}, {}),
    "llama, deltas everywhere": ({}, {"scope": "all"}),
    "llama, full weights": ({}, {"scope": None}),
    "llama, biases": ({"attention_bias": True, "mlp_bias": True}, {"scope": "all"}),
    "untied": ({"tie_word_embeddings": False}, {"scope": "all"}),
    "qwen2, second of three layers": (
        {"family": "qwen2", "num_hidden_layers": 3},
        {"scope": "all", "kept_layers": (1,)},
    ),
    "qwen3, two of three layers, full": (
        {"family": "qwen3", "num_hidden_layers": 3},
        {"scope": None, "kept_layers": (0, 2)},
    ),
    "qwen3, alignment same": ({"family": "qwen3"}, {"alignment": "same"}),
    "mask token": ({}, {"scope": "all", "mask_token_id": 301}),
    "mask token, full weights": (
        {"tie_word_embeddings": False},
        {"scope": None, "mask_token_id": 301},
    ),
    "deltas on some matrices of one layer": (
        {},
        {"delta": DeltaConfig(rank=4, scope="all", matrices=("qkv", "down"), layers=(1,))},
    ),
    "another rotary base": (
        {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
        {"scope": "all"},
    ),
}


@pytest.mark.parametrize(("target", "kind"), KINDS.values(), ids=KINDS.keys())
def test_transformers_computes_the_drafters_logits(
    target: dict[str, Any], kind: dict[str, Any], tmp_path: Path
) -> None:
    base = open_tiny(write_tiny_target(tmp_path / "target", seed=3, **target))
    ours = our_logits(saved(base, tmp_path / "drafter", **kind))
    exported = export_drafter(tmp_path / "drafter", tmp_path / "out", dtype="float32")
    theirs = their_logits(exported)
    compared = [
        token_id for token_id in range(base.config.vocab_size) if token_id != exported.mask_token_id
    ]
    assert (theirs[:, compared] - ours[:, compared]).abs().max() < 1e-4
    assert load(exported.path).config.num_hidden_layers == len(kind.get("kept_layers", (0, 1)))


@pytest.mark.parametrize("kind", [{"scope": "all"}, {"scope": None}, {"scope": "slots"}], ids=str)
def test_a_block_drafted_through_it_is_the_drafters_own(
    kind: dict[str, Any], tiny_target: Path, tmp_path: Path
) -> None:
    base = open_tiny(tiny_target)
    model = saved(base, tmp_path / "drafter", **kind)
    (draft,) = BlockDrafter(model, base.config.vocab_size).propose([request(TEXT, SLOTS + 1)])
    assert len(draft.token_ids) == SLOTS + 1
    theirs = their_logits(export_drafter(tmp_path / "drafter", tmp_path / "out", dtype="float32"))
    assert theirs[len(TEXT) - 1 :].argmax(-1).tolist() == list(draft.token_ids)


def test_the_deltas_are_in_the_weights(tiny_target: Path, tmp_path: Path) -> None:
    base = open_tiny(tiny_target)
    saved(base, tmp_path / "drafter")
    stored = load_file(
        export_drafter(tmp_path / "drafter", tmp_path / "out").path / "model.safetensors"
    )
    before = load_file(tiny_target / "model.safetensors")
    assert stored.keys() == before.keys() | {"lm_head.weight"}
    changed = {
        name
        for name, tensor in before.items()
        if name != "model.embed_tokens.weight" and not torch.equal(tensor, stored[name])
    }
    assert changed == {name for name in before if "_proj" in name}


# the mask token


def test_the_mask_gets_a_spare_row_where_there_is_one(tiny_target: Path, tmp_path: Path) -> None:
    base = open_tiny(tiny_target)
    model = saved(base, tmp_path / "drafter")
    exported = export_drafter(tmp_path / "drafter", tmp_path / "out")
    assert exported.vocab_size == base.config.vocab_size == 302
    assert exported.mask_token_id == 300 == len(base.tokenizer)
    check_mask(exported, model)
    assert not any("vocabulary" in limit for limit in exported.limits)


def test_else_the_vocabulary_grows_by_one(full: Path, tmp_path: Path) -> None:
    base = open_tiny(full)
    model = saved(base, tmp_path / "drafter")
    exported = export_drafter(tmp_path / "drafter", tmp_path / "out")
    assert (exported.vocab_size, exported.mask_token_id) == (303, 302)
    check_mask(exported, model)
    assert "303 tokens, the base's 302" in exported.limits[-1]
    assert "303 tokens, the base's 302" in (exported.path / "README.md").read_text()


def check_mask(exported: Exported, model: DrafterModel) -> None:
    tokenizer = AutoTokenizer.from_pretrained(exported.path)
    assert tokenizer.mask_token == MASK_TOKEN
    assert tokenizer.mask_token_id == exported.mask_token_id
    assert (
        tokenizer(f"a{MASK_TOKEN}", add_special_tokens=False).input_ids[-1]
        == exported.mask_token_id
    )
    assert tokenizer.decode([exported.mask_token_id], skip_special_tokens=True) == ""
    assert tokenizer.chat_template
    plain = load(exported.path)
    assert plain.config.mask_token_id == plain.config.pard_token == exported.mask_token_id
    assert plain.generation_config.suppress_tokens == [exported.mask_token_id]
    assert plain.get_input_embeddings().weight.shape[0] == exported.vocab_size
    assert model.mask_vector is not None
    assert torch.equal(
        plain.get_input_embeddings().weight[exported.mask_token_id], model.mask_vector
    )
    assert not plain.config.tie_word_embeddings


def test_no_mask_is_ever_drafted(tiny_target: Path, tmp_path: Path) -> None:
    saved(open_tiny(tiny_target), tmp_path / "drafter")
    exported = export_drafter(tmp_path / "drafter", tmp_path / "out")
    head = load_file(exported.path / "model.safetensors")["lm_head.weight"]
    hidden = torch.randn(500, head.shape[1], generator=torch.Generator().manual_seed(0)) * 10
    others = head[[token_id for token_id in range(len(head)) if token_id != exported.mask_token_id]]
    assert (hidden @ head[exported.mask_token_id] < (hidden @ others.T).amax(-1)).all()


def test_a_reserved_token_can_make_room(full: Path, tmp_path: Path) -> None:
    base = open_tiny(full)
    ours = our_logits(saved(base, tmp_path / "drafter", scope="all"))
    exported = export_drafter(tmp_path / "drafter", tmp_path / "out", mask_token_id=300)
    assert (exported.vocab_size, exported.mask_token_id, exported.limits) == (302, 300, ())
    others = [token_id for token_id in range(302) if token_id != 300]
    assert (their_logits(exported)[:, others] - ours[:, others]).abs().max() < 1e-4
    assert "token id 300, `<|reserved_0|>`" in (exported.path / "README.md").read_text()


@pytest.mark.parametrize(
    ("token_id", "message"),
    [
        (0, "end-of-answer token"),
        (302, "has embeddings for ids below 302"),
        (90, "an ordinary token of texts"),
    ],
)
def test_a_token_that_means_something_cannot_make_room(
    token_id: int, message: str, full: Path, tmp_path: Path
) -> None:
    saved(open_tiny(full), tmp_path / "drafter")
    with pytest.raises((InvalidRequest, InvalidCheckpoint), match=message):
        export_drafter(tmp_path / "drafter", tmp_path / "out", mask_token_id=token_id)
    assert [path.name for path in tmp_path.iterdir()] == ["drafter"]


def test_a_drafters_own_mask_token_stays(tiny_target: Path, tmp_path: Path) -> None:
    saved(open_tiny(tiny_target), tmp_path / "drafter", mask_token_id=301)
    exported = export_drafter(tmp_path / "drafter", tmp_path / "out")
    assert (exported.vocab_size, exported.mask_token_id) == (302, 301)
    assert "lm_head.weight" not in load_file(exported.path / "model.safetensors"), "still tied"
    assert "Masked positions are token id 301;" in (exported.path / "README.md").read_text()
    with pytest.raises(InvalidRequest, match="are token 301 already"):
        export_drafter(tmp_path / "drafter", tmp_path / "again", mask_token_id=300)


# dtypes


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_dtype_is_that_of_the_file(dtype: str, tiny_target: Path, tmp_path: Path) -> None:
    saved(open_tiny(tiny_target), tmp_path / "drafter", scope="all")
    exact = load_file(
        export_drafter(tmp_path / "drafter", tmp_path / "exact", dtype="float32").path
        / "model.safetensors"
    )
    exported = export_drafter(tmp_path / "drafter", tmp_path / "out", dtype=dtype)
    kind = getattr(torch, dtype)
    assert exported.dtype == dtype
    assert json.loads((exported.path / "config.json").read_text())["dtype"] == dtype
    stored = load_file(exported.path / "model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {kind}
    if dtype != "float32":
        assert any(not torch.equal(stored[name].float(), tensor) for name, tensor in exact.items())
    for name, tensor in exact.items():
        if name != "lm_head.weight":  # holds the mean of rounded rows
            assert torch.equal(stored[name], tensor.to(kind)), "merged in float32, rounded once"
    assert load(exported.path).dtype == kind


@pytest.mark.parametrize("scope", ["slots", None], ids=["deltas", "full"])
@pytest.mark.parametrize("stored", ["bfloat16", "float16", "float32"])
def test_by_default_it_is_that_of_the_base(stored: str, scope: str | None, tmp_path: Path) -> None:
    kind = getattr(torch, stored)
    target = write_tiny_target(tmp_path / "target", dtype=kind)
    save_file(
        {name: tensor.to(kind) for name, tensor in load_file(target / "model.safetensors").items()},
        target / "model.safetensors",
    )
    saved(open_tiny(target), tmp_path / "drafter", scope=scope)
    assert export_drafter(tmp_path / "drafter", tmp_path / "out").dtype == stored


def test_full_weights_of_unknown_dtype_become_bfloat16(tiny_target: Path, tmp_path: Path) -> None:
    saved(open_tiny(tiny_target), tmp_path / "drafter", scope=None)
    file = tmp_path / "drafter" / "decoder" / "config.json"
    file.write_text(
        json.dumps(
            {name: value for name, value in json.loads(file.read_text()).items() if name != "dtype"}
        )
    )
    assert export_drafter(tmp_path / "drafter", tmp_path / "out").dtype == "bfloat16"


def test_what_a_dtype_cannot_hold_is_refused(tiny_target: Path, tmp_path: Path) -> None:
    saved(open_tiny(tiny_target), tmp_path / "drafter")
    tensors = load_file(tmp_path / "drafter" / "model.safetensors")
    tensors["transformer.layers.1.out.up"] *= 1e7
    save_file(tensors, tmp_path / "drafter" / "model.safetensors")
    with pytest.raises(
        InvalidCheckpoint,
        match=r"model\.layers\.1\.self_attn\.o_proj\.weight holds values .* float16; try float32",
    ):
        export_drafter(tmp_path / "drafter", tmp_path / "out", dtype="float16")
    assert (
        export_drafter(tmp_path / "drafter", tmp_path / "out", dtype="float32").dtype == "float32"
    )
    with pytest.raises(InvalidRequest, match="dtype: 'int8' is not supported"):
        export_drafter(tmp_path / "drafter", tmp_path / "other", dtype="int8")


# what a plain model can't do


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ({"scope": "slots"}, ["act at slots only"]),
        ({"scope": "all"}, []),
        ({"scope": None}, []),
        ({"scope": "all", "block_attention": "bidirectional"}, ["the earlier ones only"]),
        ({"scope": "all", "alignment": "same"}, ["shifted by one"]),
        ({"scope": "all", "previous_token_width": 4}, ["previous-token head"]),
        (
            {"block_attention": "bidirectional", "previous_token_width": 4},
            ["act at slots only", "the earlier ones only", "left out"],
        ),
    ],
    ids=str,
)
def test_what_is_lost_is_said_in_the_card(
    kind: dict[str, Any], words: list[str], tiny_target: Path, tmp_path: Path
) -> None:
    saved(open_tiny(tiny_target), tmp_path / "drafter", **kind)
    exported = export_drafter(tmp_path / "drafter", tmp_path / "out")
    assert len(exported.limits) == len(words)
    card = (exported.path / "README.md").read_text()
    for limit, word in zip(exported.limits, words, strict=True):
        assert word in limit
        assert limit in card
    load(exported.path)


# where the base comes from


def test_deltas_need_their_base(tmp_path: Path) -> None:
    target = write_tiny_target(tmp_path / "target", seed=4)
    saved(open_tiny(target), tmp_path / "drafter")
    moved = target.rename(tmp_path / "moved")
    with pytest.raises(
        InvalidCheckpoint, match=r"deltas over .*target .*can't be opened: .*by --target"
    ):
        export_drafter(tmp_path / "drafter", tmp_path / "out")
    assert export_drafter(tmp_path / "drafter", tmp_path / "out", target=str(moved)).path.is_dir()
    write_tiny_target(target, seed=5)
    with pytest.raises(InvalidCheckpoint, match="has other weights now"):
        export_drafter(tmp_path / "drafter", tmp_path / "again")


def test_a_target_that_is_not_the_base_only_has_to_have_its_tokenizer(
    tiny_target: Path, tmp_path: Path
) -> None:
    small = write_tiny_target(tmp_path / "small", seed=9)
    saved(open_tiny(small), tmp_path / "drafter", scope="all")
    exported = export_drafter(tmp_path / "drafter", tmp_path / "out", target=str(tiny_target))
    again = export_drafter(tmp_path / "drafter", tmp_path / "again")
    assert torch.equal(their_logits(exported), their_logits(again))
    other = write_tiny_target(
        tmp_path / "other", texts=["quite another text, with other words"] * 4
    )
    with pytest.raises(InvalidCheckpoint, match=r"has another tokenizer than the target .*other: "):
        export_drafter(tmp_path / "drafter", tmp_path / "third", target=str(other))


def test_full_weights_need_no_base(tmp_path: Path) -> None:
    target = write_tiny_target(tmp_path / "target", seed=4, num_hidden_layers=3)
    base = open_tiny(target)
    ours = our_logits(
        saved(base, tmp_path / "drafter", scope=None, kept_layers=(0, 2), mask_token_id=301)
    )
    shutil.rmtree(target)
    exported = export_drafter(tmp_path / "drafter", tmp_path / "out", dtype="float32")
    assert (their_logits(exported) - ours).abs().max() < 1e-4
    assert json.loads((exported.path / "generation_config.json").read_text())[
        "eos_token_id"
    ] == sorted(base.eos_token_ids)


def test_a_foreign_checkpoint_is_called_by_its_name(tiny_target: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidCheckpoint, match="is not a d3d drafter but a plain llama model"):
        export_drafter(tiny_target, tmp_path / "out")


# the directory


def test_what_is_written(tiny_target: Path, tiny_drafter: Path, tmp_path: Path) -> None:
    path = export_drafter(tiny_drafter, tmp_path / "new" / "out").path
    modes = {file.name: stat.S_IMODE(file.stat().st_mode) for file in path.iterdir()}
    wanted = {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "README.md",
    }
    assert modes.keys() == wanted | {"chat_template.jinja"}
    assert len(set(modes.values())) == 1, modes
    assert json.loads((path / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    assert json.loads((path / "generation_config.json").read_text())["eos_token_id"] == [0]
    assert list(path.parent.iterdir()) == [path], "nothing is left over"
    generated = load(path).generate(
        torch.tensor([TEXT]), max_new_tokens=4, do_sample=False, pad_token_id=2
    )
    assert generated.shape[1] > len(TEXT)
    assert open_model(str(path), device="cpu", dtype="float32").config.num_layers == 2, (
        "d3d reads it, too"
    )


def test_the_rotary_base_is_where_older_readers_look(tmp_path: Path) -> None:
    target = write_tiny_target(
        tmp_path / "target", rope_parameters={"rope_type": "default", "rope_theta": 500.0}
    )
    saved(open_tiny(target), tmp_path / "drafter")
    path = export_drafter(tmp_path / "drafter", tmp_path / "out").path
    written = json.loads((path / "config.json").read_text())
    assert written["rope_theta"] == written["rope_parameters"]["rope_theta"] == 500.0
    assert AutoConfig.from_pretrained(path).rope_parameters["rope_theta"] == 500.0


def test_an_existing_directory_is_not_touched(tiny_drafter: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert export_drafter(tiny_drafter, tmp_path / "empty").path.is_dir()
    before = (tmp_path / "empty" / "config.json").read_bytes()
    with pytest.raises(
        InvalidRequest, match="empty exists already; remove it, or name another directory"
    ):
        export_drafter(tiny_drafter, tmp_path / "empty", dtype="bfloat16")
    assert (tmp_path / "empty" / "config.json").read_bytes() == before
    (tmp_path / "file").write_text("mine")
    with pytest.raises(InvalidRequest, match="file exists already"):
        export_drafter(tiny_drafter, tmp_path / "file")


def test_interrupted_it_leaves_nothing(
    tiny_drafter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("d3d.hub.export.exported_card", killed)
    with pytest.raises(KeyboardInterrupt):
        export_drafter(tiny_drafter, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
