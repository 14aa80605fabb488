"""Is an answer right? Final answers of maths problems by comparison, code by running the set's own
tests.

These are not the sets' official graders: a right answer in an unusual form can be missed. Here they
tell whether a method changes what the target is worth, and whether an answer is more than fast
rubbish."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Any

from d3d.lab.bench.guarded import runs_through

NEEDS_RUNNING = frozenset({"humaneval", "mbpp"})
"""Kinds of references that are scored by running the answer."""

_BLOCK = re.compile(r"```(?:python|py)?[ \t]*\r?\n(.*?)(?:```|\Z)", re.DOTALL | re.IGNORECASE)
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?(?:\s*/\s*\d+)?")
_FRACTION = re.compile(r"(-?)\\frac\{(-?\d+)\}\{(-?\d+)\}")


def score(answer: str, reference: dict[str, Any] | None, *, run_code: bool = False) -> bool | None:
    """Whether the answer is right; None where that can't be known: no reference, or code that must
    not be run."""
    kind = None if reference is None else reference["kind"]
    if reference is None or (kind in NEEDS_RUNNING and not run_code):
        return None
    if kind == "number":
        return same_value(final_number(answer), reference["answer"])
    if kind == "math":
        return same_value(boxed(answer), reference["answer"])
    return runs_through(
        humaneval_program(answer, reference)
        if kind == "humaneval"
        else mbpp_program(answer, reference)
    )


def boxed(text: str) -> str | None:
    """What the last \\boxed{...} of a text holds, its own braces included."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    depth, begin = 0, start + len("\\boxed")
    for place in range(begin, len(text)):
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if depth == 0:
            return text[begin + 1 : place]
    return None


def final_number(text: str) -> str | None:
    """The number in the last box, else the last number of a text."""
    found = _NUMBER.findall(boxed(text) or text)
    return found[-1] if found else None


def same_value(one: str | None, other: str) -> bool:
    """Whether two final answers say the same: equal once LaTeX's variants are put right, or equal
    as numbers."""
    if one is None:
        return False
    a, b = _plain(one), _plain(other)
    if a == b:
        return True
    x, y = _value(a), _value(b)
    return x is not None and x == y


def _plain(text: str) -> str:
    for old, new in (
        ("\\left", ""),
        ("\\right", ""),
        ("dfrac", "frac"),
        ("tfrac", "frac"),
        ("^\\circ", ""),
        ("^{\\circ}", ""),
    ):
        text = text.replace(old, new)
    text = re.sub(r"\\(?:text|mbox|mathrm|textbf)\{([^{}]*)\}", r"\1", text)
    text = re.sub(r"\\[,;!: ]|\\\$|\\%|[\s$%]", "", text)
    text = re.sub(r"\\frac(\d)(\d)", r"\\frac{\1}{\2}", text)
    text = re.sub(r"\\sqrt(\w)", r"\\sqrt{\1}", text)
    text = re.sub(r"^[a-zA-Z]=", "", text)
    text = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", text)
    return text.rstrip(".")


def _value(text: str) -> Fraction | None:
    if found := _FRACTION.fullmatch(text):
        sign, above, below = found.groups()
        text = f"{sign}{above}/{below}".replace("--", "")
    try:
        return Fraction(text)
    except (ValueError, ZeroDivisionError):
        return None


def code_of(answer: str) -> str:
    """The fenced block of an answer that defines something, else its first block, else the answer
    as it is."""
    blocks: list[str] = _BLOCK.findall(answer)
    return next(
        (block for block in blocks if "def " in block or "class " in block),
        blocks[0] if blocks else answer,
    )


def humaneval_program(answer: str, reference: dict[str, Any]) -> str:
    """The answer with the task's tests; it may repeat the function's head, or go on where the task
    ended."""
    code, name = code_of(answer), reference["entry_point"]
    begun = reference["prompt"]
    whole = (
        f"{begun}\n    pass\n\n{code}"
        if re.search(rf"^(?:async )?def {re.escape(name)}\b", code, re.MULTILINE)
        else begun + code
    )
    return f"{whole}\n\n{reference['test']}\n\ncheck({name})\n"


def mbpp_program(answer: str, reference: dict[str, Any]) -> str:
    return "\n".join([code_of(answer), reference["setup"], *reference["tests"]])
