"""Compile the C library on first use, and load it."""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

from d3d.errors import CantWrite, D3DError
from d3d.hub.cache import cache_root, making
from d3d.machine import cpu_flags

SOURCES = Path(__file__).parent / "csrc"

LEVELS = {
    "avx512": ("avx512f", "avx512bw", "avx512vl", "avx512dq", "avx2", "fma", "f16c"),
    "avx2": ("avx2", "fma", "f16c"),
    "generic": (),
}
"""Instruction sets, best first, with the processor flags that each needs; they are also the
compiler's options. `generic` is whatever the compiler assumes: NEON on 64-bit ARM."""

FLAGS = (
    "-std=gnu11",
    "-O3",
    "-fPIC",
    "-fvisibility=hidden",
    "-ffp-contract=off",  # see fma_ in vec.h
    "-pthread",
    "-shared",
)
SECONDS = 300
"""Maximum time of a compilation."""


class NativeUnavailable(D3DError):
    """The C library can't be built or loaded here, or can't hold this model."""


def levels_here() -> list[str]:
    """Levels that this processor runs, best first."""
    flags = cpu_flags()
    return [level for level, needed in LEVELS.items() if flags.issuperset(needed)]


def load() -> ctypes.CDLL:
    """The library for this processor.

    `D3D_NATIVE=0` turns it off; the name of a level chooses a lower one. Raises NativeUnavailable,
    with the reason in one line."""
    return load_level(chosen_level(os.environ.get("D3D_NATIVE", "")))


def why_not() -> str | None:
    """Reason why `load` fails here; None if it works. Builds the library."""
    try:
        load()
    except NativeUnavailable as error:
        return str(error)
    return None


def chosen_level(wish: str) -> str:
    """wish: value of D3D_NATIVE. Raises NativeUnavailable."""
    here = levels_here()
    if wish == "0":
        raise NativeUnavailable("the C library is turned off by D3D_NATIVE=0")
    if wish in ("", "1"):
        return here[0]
    if wish not in here:
        raise NativeUnavailable(
            f"D3D_NATIVE={wish}: this processor runs {', '.join(here)}; use one of these, or 0"
        )
    return wish


@cache
def load_level(level: str) -> ctypes.CDLL:
    """The library of one level, from the cache or compiled now. Raises NativeUnavailable."""
    if sys.platform == "win32":
        raise NativeUnavailable("the C library does not run on Windows; use the torch engine")
    options = [*FLAGS, *(f"-m{flag}" for flag in LEVELS[level])]
    target = cache_root() / "native" / f"{_digest(options)}-{level}.so"
    try:
        if not target.is_file():
            with making(target) as work:
                if not target.is_file():  # another process was faster
                    _compile(options, work / target.name)
                    os.replace(work / target.name, target)
        return ctypes.CDLL(str(target))
    except (CantWrite, OSError) as error:
        raise NativeUnavailable(f"the C library can't be loaded: {error}") from None


def _digest(options: list[str]) -> str:
    digest = hashlib.sha256(" ".join([platform.machine(), *options]).encode())
    for file in sorted(SOURCES.glob("*.[ch]")):
        digest.update(file.name.encode() + file.read_bytes())
    return digest.hexdigest()[:16]


def compiler() -> list[str]:
    """Command of the C compiler: `$CC`, the system's, or the one in the ziglang package. Raises
    NativeUnavailable if there is none."""
    if named := os.environ.get("CC"):
        return named.split()
    if found := shutil.which("cc") or shutil.which("gcc") or shutil.which("clang"):
        return [found]
    if importlib.util.find_spec("ziglang"):
        return [sys.executable, "-m", "ziglang", "cc"]
    raise NativeUnavailable(
        "the C library needs a C compiler, once: install gcc or clang, or pip install ziglang"
    )


def _compile(options: list[str], output: Path) -> None:
    files = map(str, sorted(SOURCES.glob("*.c")))
    command = [*compiler(), *options, "-o", str(output), *files, "-lm"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NativeUnavailable(f"the C library can't be compiled: {error}") from None
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "error" in line] or ["no message"]
        raise NativeUnavailable(
            f"the C library can't be compiled by {command[0]}: {lines[0].strip()}"
        )
