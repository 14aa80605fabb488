"""Drafter checkpoints: what is saved comes back, and what is not a whole drafter for this target is
refused with a reason."""

from __future__ import annotations

import json
import shutil
import stat
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from d3d.errors import InvalidCheckpoint
from d3d.files import restore_interrupted
from d3d.hub.checkpoint import SCALE, read_config, save_drafter
from d3d.hub.open_drafter import load_drafter
from d3d.hub.open_model import OpenModel
from d3d.methods.serial.drafter import BlockDrafter
from d3d.model.drafter import DrafterModel
from support.drafters import block_logits, request
from support.tiny_model import open_tiny, random_drafter, write_tiny_drafter, write_tiny_target

TEXT = [5, 17, 80, 3, 41, 200, 7]


@pytest.fixture(scope="module")
def base(tiny_target: Path) -> OpenModel:
    return open_tiny(tiny_target)


@pytest.fixture
def checkpoint(tiny_drafter: Path, tmp_path: Path) -> Path:
    """A copy that may be damaged."""
    return Path(shutil.copytree(tiny_drafter, tmp_path / "drafter"))


def edit(checkpoint: Path, **changes: Any) -> None:
    file = checkpoint / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def retensor(checkpoint: Path, change: Any) -> None:
    tensors = load_file(checkpoint / "model.safetensors")
    change(tensors)
    save_file(tensors, checkpoint / "model.safetensors")


def logits(model: DrafterModel) -> torch.Tensor:
    return block_logits(model, TEXT, [-1] * 4)


KINDS = {
    "deltas at slots": {},
    "deltas everywhere": {"scope": "all"},
    "full weights": {"scope": None},
    "one layer": {"kept_layers": (1,)},
    "one layer, full": {"scope": None, "kept_layers": (1,)},
    "same, bidirectional": {"alignment": "same", "block_attention": "bidirectional"},
    "mask token": {"mask_token_id": 301},
}


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())
def test_float32_comes_back_exactly(kind: dict[str, Any], base: OpenModel, tmp_path: Path) -> None:
    model = random_drafter(base, **kind)
    save_drafter(tmp_path / "d", model, base, storage="float32")
    loaded = load_drafter(tmp_path / "d", base)
    assert loaded.config == model.config
    assert loaded.trainable().keys() == model.trainable().keys()
    for name, parameter in model.trainable().items():
        assert torch.equal(loaded.trainable()[name], parameter), name
    assert torch.equal(logits(loaded), logits(model))


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())
def test_int8_comes_back_within_half_a_step(
    kind: dict[str, Any], base: OpenModel, tmp_path: Path
) -> None:
    model = random_drafter(base, **kind)
    save_drafter(tmp_path / "d", model, base)
    loaded = load_drafter(tmp_path / "d", base)
    stored = load_file(tmp_path / "d" / "model.safetensors")
    for name, parameter in model.trainable().items():
        difference = (loaded.trainable()[name] - parameter).abs().detach()
        if parameter.dim() < 2:
            assert torch.equal(loaded.trainable()[name], parameter), name
            continue
        assert stored[name].dtype == torch.int8
        half_step = parameter.abs().amax(1, keepdim=True) / 127 / 2
        assert (difference <= half_step * 1.001 + 1e-12).all(), name


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("scope", ["slots", None], ids=["deltas", "full"])
def test_a_tied_and_an_untied_head_survive(tied: bool, scope: str | None, tmp_path: Path) -> None:
    base = open_tiny(write_tiny_target(tmp_path / "target", tie_word_embeddings=tied, seed=3))
    model = random_drafter(base, scope=scope)
    save_drafter(tmp_path / "d", model, base, storage="float32")
    loaded = load_drafter(tmp_path / "d", base)
    assert (loaded.transformer.head.weight is loaded.transformer.embedding) is tied
    assert torch.equal(logits(loaded), logits(model))


def test_what_it_drafts_after_loading_is_what_it_drafted_before_saving(
    base: OpenModel, tmp_path: Path
) -> None:
    model = random_drafter(base)
    save_drafter(tmp_path / "d", model, base, storage="float32")
    drafts = [
        BlockDrafter(drafter, base.config.vocab_size).propose([request(TEXT)])
        for drafter in (model, load_drafter(tmp_path / "d", base))
    ]
    assert drafts[0] == drafts[1]


def test_a_loaded_drafter_can_be_saved_and_trained_again(base: OpenModel, tmp_path: Path) -> None:
    save_drafter(tmp_path / "one", random_drafter(base), base, storage="float32")
    loaded = load_drafter(tmp_path / "one", base)
    save_drafter(tmp_path / "two", loaded, base, storage="float32")
    assert all(parameter.requires_grad for parameter in loaded.trainable().values())
    again = load_drafter(tmp_path / "two", base)
    assert torch.equal(logits(again), logits(loaded))


def test_deltas_over_the_target_share_its_weights(base: OpenModel, tiny_drafter: Path) -> None:
    model = load_drafter(tiny_drafter, base)
    assert model.transformer.embedding.data_ptr() == base.transformer.embedding.data_ptr()
    for ours, theirs in zip(model.transformer.layers, base.transformer.layers, strict=True):
        assert ours.qkv.weight.data_ptr() == theirs.qkv.weight.data_ptr()  # type: ignore[union-attr]
        assert theirs.qkv.up is None, "the target itself carries no delta"


def test_deltas_over_another_model_load_it_by_name(tmp_path: Path, base: OpenModel) -> None:
    small = write_tiny_target(tmp_path / "small", seed=9)
    drafter = write_tiny_drafter(tmp_path / "d", small)
    model = load_drafter(drafter, base)
    assert torch.equal(model.transformer.embedding, open_tiny(small).transformer.embedding)
    assert not torch.equal(model.transformer.embedding, base.transformer.embedding)


def test_a_base_that_is_gone_is_named(tmp_path: Path, base: OpenModel) -> None:
    small = write_tiny_target(tmp_path / "small", seed=9)
    drafter = write_tiny_drafter(tmp_path / "d", small)
    shutil.rmtree(small)
    with pytest.raises(
        InvalidCheckpoint,
        match=r"holds deltas over .*small .*can't be opened: .*not over the target",
    ):
        load_drafter(drafter, base)


def test_a_base_that_has_changed_is_refused(tmp_path: Path, base: OpenModel) -> None:
    small = write_tiny_target(tmp_path / "small", seed=9)
    drafter = write_tiny_drafter(tmp_path / "d", small)
    write_tiny_target(small, seed=10)
    with pytest.raises(InvalidCheckpoint, match=r"deltas over .*small .*has other weights now"):
        load_drafter(drafter, base)


def test_full_weights_need_no_base(tmp_path: Path, base: OpenModel) -> None:
    small = write_tiny_target(tmp_path / "small", seed=9, num_hidden_layers=3)
    model = random_drafter(open_tiny(small), scope=None, kept_layers=(0, 2))
    save_drafter(tmp_path / "d", model, open_tiny(small), storage="float32")
    shutil.rmtree(small)
    assert torch.equal(logits(load_drafter(tmp_path / "d", base)), logits(model))


def test_files_may_be_read_by_others(tiny_drafter: Path) -> None:
    modes = {file.name: stat.S_IMODE(file.stat().st_mode) for file in tiny_drafter.iterdir()}
    assert modes["model.safetensors"] == modes["config.json"]
    assert len(set(modes.values())) == 1, modes


@pytest.mark.parametrize(
    ("content", "what"),
    [
        ({"model_type": "llama"}, "a plain llama model"),
        ({"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}, "a plain qwen3 model"),
        (
            {"model_type": "qwen3", "architectures": ["DFlashDraftModel"]},
            "a DFlash drafter, which needs the target's hidden states",
        ),
        ({"model_type": "llama", "architectures": ["LlamaForCausalLMEagle3"]}, "an EAGLE drafter"),
        ({"medusa_num_heads": 4, "base_model_name_or_path": "x"}, "a Medusa drafter"),
        ({"hidden_size": 4}, "something else"),
        ([1, 2], "something else"),
    ],
    ids=str,
)
def test_a_foreign_checkpoint_is_called_by_its_name(
    content: Any, what: str, tmp_path: Path, base: OpenModel
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(content))
    with pytest.raises(InvalidCheckpoint) as caught:
        load_drafter(tmp_path, base)
    assert f"is not a d3d drafter but {what}" in str(caught.value)


def test_no_config_a_damaged_one_a_newer_format_and_an_unknown_key(checkpoint: Path) -> None:
    edit(checkpoint, format=2)
    with pytest.raises(
        InvalidCheckpoint, match="has format 2, this version of d3d reads 1; update d3d"
    ):
        read_config(checkpoint)
    edit(checkpoint, format=1, temperature=2)
    with pytest.raises(
        InvalidCheckpoint,
        match=r"temperature: there is no such key; there are: .*; if a newer d3d wrote it",
    ):
        read_config(checkpoint)
    (checkpoint / "config.json").write_text('{"model_type": ')
    with pytest.raises(InvalidCheckpoint, match=r"config\.json can't be read as JSON"):
        read_config(checkpoint)
    (checkpoint / "config.json").unlink()
    with pytest.raises(InvalidCheckpoint, match=r"holds no config\.json"):
        read_config(checkpoint)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block_size": 0}, "drafter.block_size"),
        ({"alignment": "previous"}, "drafter.alignment"),
        ({"kept_layers": [1, 0]}, "kept_layers must be ascending"),
        ({"kept_layers": [0, 7]}, "keeps layer 7"),
        ({"mask_token_id": -4}, "drafter.mask_token_id"),
        ({"mask_token_id": 302}, "mask_token_id is 302, but"),
        ({"mask_token_id": 0}, "mask_token_id is 0, the end-of-answer token"),
        ({"mask_token_id": 2}, "mask_token_id is 2, the padding token"),
    ],
    ids=str,
)
def test_an_impossible_drafter_is_refused(
    change: dict[str, Any], message: str, checkpoint: Path, base: OpenModel
) -> None:
    drafter = json.loads((checkpoint / "config.json").read_text())["drafter"]
    edit(checkpoint, drafter=drafter | change)
    with pytest.raises(InvalidCheckpoint) as caught:
        load_drafter(checkpoint, base)
    assert message in str(caught.value)


@pytest.mark.parametrize("token_id", [0, 2])
def test_a_mask_token_that_means_something_cannot_be_saved(
    token_id: int, base: OpenModel, tmp_path: Path
) -> None:
    with pytest.raises(InvalidCheckpoint, match="take a row that no text uses"):
        save_drafter(tmp_path / "d", random_drafter(base, mask_token_id=token_id), base)
    assert not (tmp_path / "d").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop("mask_vector"), "lacks mask_vector"),
        (
            lambda tensors: tensors.update(extra=torch.zeros(2)),
            "holds extra, which no drafter of this config has",
        ),
        (
            lambda tensors: tensors.update(mask_vector=torch.zeros(65)),
            "mask_vector (65,), the config says (64,)",
        ),
        (
            lambda tensors: tensors.update(mask_vector=torch.zeros(64, dtype=torch.int64)),
            "mask_vector as torch.int64",
        ),
        (
            lambda tensors: tensors.pop("transformer.layers.0.qkv.up" + SCALE),
            "lacks transformer.layers.0.qkv.up.scale",
        ),
        (
            lambda tensors: tensors.update({"mask_vector.scale": torch.zeros(64)}),
            "holds mask_vector.scale",
        ),
        (
            lambda tensors: tensors.update({"transformer.layers.0.qkv.up.scale": torch.zeros(3)}),
            "qkv.up.scale (3,)",
        ),
    ],
)
def test_odd_tensors_are_named(
    change: Any, message: str, checkpoint: Path, base: OpenModel
) -> None:
    retensor(checkpoint, change)
    with pytest.raises(InvalidCheckpoint) as caught:
        load_drafter(checkpoint, base)
    assert message in str(caught.value)


def test_a_file_cut_short_is_named(checkpoint: Path, base: OpenModel) -> None:
    file = checkpoint / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(InvalidCheckpoint, match=r"model\.safetensors is damaged"):
        load_drafter(checkpoint, base)


def test_weights_that_are_missing_are_named(checkpoint: Path, base: OpenModel) -> None:
    (checkpoint / "model.safetensors").unlink()
    with pytest.raises(InvalidCheckpoint, match=r"holds neither model\.safetensors"):
        load_drafter(checkpoint, base)


def test_another_tokenizer_is_refused_with_the_first_difference(
    tmp_path: Path, tiny_drafter: Path
) -> None:
    other = open_tiny(
        write_tiny_target(tmp_path / "other", texts=["quite another text, with other words"] * 4)
    )
    with pytest.raises(
        InvalidCheckpoint,
        match=r"has another tokenizer than the target .*"
        r"token id \d+ is '.*' in the first and '.*' in the second",
    ):
        load_drafter(tiny_drafter, other)


def test_an_older_checkpoint_stays_when_saving_is_killed(
    base: OpenModel, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = logits(load_drafter(checkpoint, base))
    changed = random_drafter(base, seed=99)

    def killed(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("d3d.hub.checkpoint.save_file", killed)
        with pytest.raises(KeyboardInterrupt):
            save_drafter(checkpoint, changed, base)
    assert torch.equal(logits(load_drafter(checkpoint, base)), before)
    save_drafter(checkpoint, changed, base)
    assert not torch.equal(logits(load_drafter(checkpoint, base)), before)
    assert [path.name for path in checkpoint.parent.iterdir()] == [checkpoint.name], (
        "nothing is left over"
    )


def test_killed_between_the_two_renames_the_older_one_is_put_back(
    base: OpenModel, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename = Path.rename

    def killed_at_the_second(self: Path, to: Path) -> Path:
        if self.name.endswith(".partial"):
            raise KeyboardInterrupt
        return rename(self, to)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", killed_at_the_second)
        with pytest.raises(KeyboardInterrupt):
            save_drafter(checkpoint, random_drafter(base, seed=99), base)
    assert not checkpoint.exists()
    restore_interrupted(checkpoint)
    assert read_config(checkpoint).drafter.block_size == 6


def test_provenance_is_kept(tiny_drafter: Path) -> None:
    assert json.loads((tiny_drafter / "provenance.json").read_text())["measured"] == {
        "acceptance_length": 1.0
    }
