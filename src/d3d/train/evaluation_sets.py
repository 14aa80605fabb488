"""The public evaluation sets: the formats in which benchmarks ask for an answer, and recognition of
their problems, so that nobody trains on them by accident.

The problems themselves are not stored, only a hash of each one's first words and a hash of all its
words. A text holds a problem if it contains its words in order, whatever surrounds them; white
space, case, punctuation and LaTeX brackets do not matter. A reworded problem is not recognised."""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections.abc import Iterable, Mapping
from importlib import resources
from typing import Any

import numpy as np
import numpy.typing as npt

PLACE = "{prompt}"

FORMATS = {
    "boxed": "{prompt}\nPlease reason step by step, and put your final answer within \\boxed{}.",
    "steps": "{prompt}\nLet's think step by step.",
    "code": "Write a solution to the following problem and make sure that it passes the tests:\n"
    "```python\n{prompt}\n```",
}
"""Answer formats by name. `boxed` (maths) and `code` (HumanEval) are those of DFlash's benchmark
script (z-lab/dflash, benchmark.py)."""

SETS = {
    "gsm8k": "GSM8K test",
    "math500": "MATH-500",
    "aime25": "AIME 2025",
    "humaneval": "HumanEval",
    "mbpp": "MBPP 11-510",
    "livecodebench": "LiveCodeBench v6",
    "mt_bench": "MT-Bench",
}
"""Titles of the sets that are recognised, by their name in the packaged file."""

ENTRY = np.dtype([("probe", "<u4"), ("words", "<u2"), ("digest", "<u8")])
"""One problem: hash of its first PROBE words, number of words, hash of all of them."""

PROBE = 8
"""Words by which a problem is looked up. A shorter one must be the whole text: many texts contain
`Compute 5!`."""

Entries = npt.NDArray[Any]

_WORD = re.compile(r"[^\W_]+|[^\w\s]|_")
_IGNORED = frozenset(".,;:?\"'`$\\{}")
_ALIKE = str.maketrans("\u2018\u2019\u201c\u201d\u2013\u2014\u2212", "''\"\"---")


def apply_format(name_or_text: str, prompt: str) -> str:
    """The prompt in a named format, or in a text that has `{prompt}` in it or is a plain suffix."""
    text = FORMATS.get(name_or_text, name_or_text)
    return text.replace(PLACE, prompt, 1) if PLACE in text else prompt + text


def without_formats(text: str) -> str:
    """Strip the named formats from a text; the prompt is left."""
    text = text.strip()
    for form in FORMATS.values():
        before, after = (part.strip() for part in form.split(PLACE))
        if text.startswith(before) and text.endswith(after):
            text = text[len(before) : len(text) - len(after)].strip()
    return text


class EvaluationSets:
    """Problems of evaluation sets by set name; `find` looks for them in a text."""

    def __init__(self, sets: Mapping[str, Entries]) -> None:
        """sets: ENTRY arrays by name."""
        self._by_probe: dict[int, list[tuple[str, int, int]]] = {}
        for name, entries in sets.items():
            for probe, num_words, digest in entries.tolist():
                self._by_probe.setdefault(probe, []).append((name, num_words, digest))

    def find(self, text: str) -> str | None:
        """Name of a set that has a problem in this text, or None."""
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
    """The sets of SETS, from the packaged file that recipes/evaluation_sets.py writes."""
    stored = resources.files("d3d").joinpath("assets/evaluation_sets.npz")
    with stored.open("rb") as file, np.load(file) as archive:
        return EvaluationSets({name: archive[name] for name in SETS})


def fingerprint(problems: Iterable[str]) -> Entries:
    """ENTRY array of these problems."""
    split = [words(problem) for problem in problems]
    return np.array([(_probe(text), len(text), _digest(text)) for text in split], dtype=ENTRY)


def words(text: str) -> list[str]:
    """Words, numbers and signs of a text in lower case, without punctuation and LaTeX brackets."""
    plain = unicodedata.normalize("NFKC", text.translate(_ALIKE)).casefold()
    return [word for word in _WORD.findall(plain) if word not in _IGNORED]


def _probe(text: list[str]) -> int:
    return _hash(text[:PROBE], 4)


def _digest(text: list[str]) -> int:
    return _hash(text, 8)


def _hash(text: list[str], size: int) -> int:
    digest = hashlib.blake2b(" ".join(text).encode(), digest_size=size).digest()
    return int.from_bytes(digest, "little")
