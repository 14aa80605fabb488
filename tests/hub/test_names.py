"""From the name of a model to its files, those in the hub's cache included."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from d3d.errors import InvalidCheckpoint
from d3d.hub import names
from d3d.hub.names import resolve_model
from d3d.hub.open_model import read_tensors
from support.tiny_gguf import TinyGguf


def test_an_unknown_name_lists_what_was_tried() -> None:
    with pytest.raises(
        InvalidCheckpoint, match=r"'nonsense'.*directory.*hub id.*presets are smollm2-135m"
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
    min(sharded.glob("*.safetensors")).unlink()
    hub_cache(monkeypatch, tmp_path / "hub", sharded)
    asked: list[str] = []
    original = names.snapshot_download

    def watch(name: str, **options: object) -> str:
        if not options.get("local_files_only"):
            asked.append(name)
        return str(original(name, **options))

    monkeypatch.setattr(names, "snapshot_download", watch)
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
        """Like an error of the hub's HTTP client: neither an OSError nor a ValueError."""

    def snapshot_download(*_: object, local_files_only: bool = False, **__: object) -> str:
        if local_files_only:
            raise FileNotFoundError
        raise RemoteProtocolError("Server disconnected")

    monkeypatch.setattr(names, "snapshot_download", snapshot_download)
    with pytest.raises(
        InvalidCheckpoint, match=r"could not get org/none from the hub.*Server disconnected"
    ):
        resolve_model("org/none")
