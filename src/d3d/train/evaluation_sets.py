"""Recognise the problems of the usual evaluation sets, so that nobody trains on them unawares.

The problems themselves are not here: of each there is a hash of its first words and one of all of
them. A text holds a problem if its words stand in it one after another, whatever stands around them
and whatever the white space, the case, the punctuation and the LaTeX brackets are. A reworded
problem is not recognised."""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections.abc import Iterable, Mapping
from importlib import resources
from typing import Any

import numpy as np
import numpy.typing as npt

from d3d.train.formats import without_formats

SETS = {
    "gsm8k": "GSM8K test",
    "math500": "MATH-500",
    "aime25": "AIME 2025",
    "humaneval": "HumanEval",
    "mbpp": "MBPP 11-510",
    "livecodebench": "LiveCodeBench v6",
    "mt_bench": "MT-Bench",
}
"""What the package knows, by the name in its file."""

ENTRY = np.dtype([("probe", "<u4"), ("words", "<u2"), ("digest", "<u8")])
"""One problem: hash of its first PROBE words, how many it has, hash of all."""

PROBE = 8
"""Words by which a problem is looked for. One with fewer must be the whole text: `Compute 5!`
stands in many others."""

Entries = npt.NDArray[Any]

_WORD = re.compile(r"[^\W_]+|[^\w\s]|_")
_LOOSE = frozenset(".,;:?\"'`$\\{}")
_ALIKE = str.maketrans(
    {
        "\u2018": "'",
        "\u2019": "'",
        "\u201c": '"',
        "\u201d": '"',
        "\u2013": "-",
        "\u2014": "-",
        "\u2212": "-",
    }
)


class EvaluationSets:
    """Problems of sets by name; `find` looks for them in a text."""

    def __init__(self, sets: Mapping[str, Entries]) -> None:
        """sets: ENTRY arrays by name."""
        self._by_probe: dict[int, list[tuple[str, int, int]]] = {}
        for name, entries in sets.items():
            for probe, words, digest in entries.tolist():
                self._by_probe.setdefault(probe, []).append((name, words, digest))

    def find(self, text: str) -> str | None:
        """Name of the set that a problem in this text is from, or None."""
        whole = words(text)
        for start in range(max(1, len(whole) - PROBE + 1)):
            for name, count, digest in self._by_probe.get(_probe(whole[start:]), ()):
                if count >= PROBE and _digest(whole[start : start + count]) == digest:
                    return name
        bare = words(without_formats(text))
        for name, count, digest in self._by_probe.get(_probe(bare), ()):
            if count == len(bare) and _digest(bare) == digest:
                return name
        return None


def known_sets() -> EvaluationSets:
    """The sets of SETS, from the file that the package brings; made by
    recipes/evaluation_sets.py."""
    with (
        resources.files("d3d").joinpath("assets/evaluation_sets.npz").open("rb") as file,
        np.load(file) as archive,
    ):
        return EvaluationSets({name: archive[name] for name in SETS})


def fingerprint(problems: Iterable[str]) -> Entries:
    """ENTRY array of these problems."""
    split = [words(problem) for problem in problems]
    return np.array([(_probe(one), len(one), _digest(one)) for one in split], dtype=ENTRY)


def words(text: str) -> list[str]:
    """Words, numbers and signs of a text in lower case; punctuation and LaTeX's brackets are left
    out."""
    plain = unicodedata.normalize("NFKC", text.translate(_ALIKE)).casefold()
    return [word for word in _WORD.findall(plain) if word not in _LOOSE]


def _probe(text: list[str]) -> int:
    return _hash(text[:PROBE], 4)


def _digest(text: list[str]) -> int:
    return _hash(text, 8)


def _hash(text: list[str], size: int) -> int:
    return int.from_bytes(
        hashlib.blake2b(" ".join(text).encode(), digest_size=size).digest(), "little"
    )
