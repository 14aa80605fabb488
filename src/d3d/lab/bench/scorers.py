"""Scores answers: final answers of maths problems by comparison, code by running the set's own
tests.

These are not the sets' official graders: a right answer in an unusual form may be missed. They show
whether a method changes the quality of the target's answers.

Code runs in a process of its own, restricted against accidents, not against attacks: no
environment, an empty directory, limits on time, memory and output, and an audit hook that refuses
to write files, start processes or open connections. If you expect malice, run the whole benchmark
in a virtual machine. Code is therefore run on request only."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
from fractions import Fraction
from pathlib import Path
from typing import Any

NEEDS_RUNNING = frozenset({"humaneval", "mbpp"})
"""Kinds of references that are scored by running the answer."""
OUTPUT_BYTES = 1 << 20

_BLOCK = re.compile(r"```(?:python|py)?[ \t]*\r?\n(.*?)(?:```|\Z)", re.DOTALL | re.IGNORECASE)
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?(?:\s*/\s*\d+)?")
_FRACTION = re.compile(r"(-?)\\frac\{(-?\d+)\}\{(-?\d+)\}")


def score(answer: str, reference: dict[str, Any] | None, *, run_code: bool = False) -> bool | None:
    """True if the answer is right; None if unknown: no reference, or code that must not be run."""
    kind = None if reference is None else reference["kind"]
    if reference is None or (kind in NEEDS_RUNNING and not run_code):
        return None
    if kind == "number":
        return same_value(final_number(answer), reference["answer"])
    if kind == "math":
        return same_value(boxed(answer), reference["answer"])
    program = humaneval_program if kind == "humaneval" else mbpp_program
    return runs_through(program(answer, reference))


def boxed(text: str) -> str | None:
    """Contents of the last \\boxed{...} of a text, nested braces included."""
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
    """True if two final answers agree: equal after LaTeX variants are normalised, or equal as
    numbers."""
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
    """The first fenced block that defines something, else the first block, else the whole
    answer."""
    blocks: list[str] = _BLOCK.findall(answer)
    return next(
        (block for block in blocks if "def " in block or "class " in block),
        blocks[0] if blocks else answer,
    )


def humaneval_program(answer: str, reference: dict[str, Any]) -> str:
    """The answer with the task's tests; it may repeat the function's signature, or continue after
    the task's prompt."""
    code, name = code_of(answer), reference["entry_point"]
    begun = reference["prompt"]
    whole = (
        f"{begun}\n    pass\n\n{code}"
        if re.search(rf"^(?:async )?def {re.escape(name)}\b", code, re.MULTILINE)
        else begun + code
    )
    return f"{whole}\n\n{reference['test']}\n\ncheck({name})\n"


def mbpp_program(answer: str, reference: dict[str, Any]) -> str:
    """The answer with the task's tests."""
    return "\n".join([code_of(answer), reference["setup"], *reference["tests"]])


_BOOT = """
import resource, sys
def limit(kind, value):
    hard = resource.getrlimit(kind)[1]
    lower = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(kind, (lower, value if hard == resource.RLIM_INFINITY else hard))
limit(resource.RLIMIT_CPU, int(sys.argv[1]))
limit(resource.RLIMIT_AS, int(sys.argv[2]))
limit(resource.RLIMIT_FSIZE, int(sys.argv[3]))
limit(resource.RLIMIT_CORE, 0)
source = sys.stdin.read()
calls = "system exec fork posix_spawn spawn kill remove rename rmdir mkdir chmod chown link symlink"
refused = ("socket.", "subprocess.", "shutil.", "ctypes.", "os.truncate")
refused += tuple("os." + call for call in calls.split())
def writes(mode):
    return isinstance(mode, str) and set(mode) & set("wax+")
def guard(event, arguments):
    if event.startswith(refused) or event == "open" and writes(arguments[1]):
        raise PermissionError(event + " is refused here")
sys.argv = ["answer"]
sys.addaudithook(guard)
exec(compile(source, "answer.py", "exec"), {"__name__": "__main__"})
"""


def runs_through(program: str, *, timeout_s: float = 10.0, memory_bytes: int = 1 << 30) -> bool:
    """True if a program runs to its end, within the limits and without an exception.

    Needs a POSIX system. memory_bytes: limit of address space."""
    mark = secrets.token_hex(16)
    program = f"{program}\nprint()\nprint({mark!r})\n"
    with (
        tempfile.TemporaryDirectory() as directory,
        (Path(directory) / "output").open("w+b") as output,
    ):
        arguments = [str(max(1, round(timeout_s))), str(memory_bytes), str(OUTPUT_BYTES)]
        child = subprocess.Popen(
            [sys.executable, "-I", "-B", "-c", _BOOT, *arguments],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.DEVNULL,
            cwd=directory,
            env={"HOME": directory},
            start_new_session=True,
        )
        try:
            child.communicate(program.encode(), timeout=timeout_s)
        except subprocess.TimeoutExpired:
            return False
        finally:
            _end(child)
        output.seek(0)
        last = output.read().decode(errors="replace").split()[-1:]
        return child.returncode == 0 and last == [mark]


def _end(child: subprocess.Popen[bytes]) -> None:
    """Kill the child, and any process that it may have started after all."""
    with contextlib.suppress(ProcessLookupError):  # it has already ended
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()
