"""Right answers are told from wrong ones, and code that runs away is stopped."""

from __future__ import annotations

import time
from typing import Any

import pytest

from d3d.lab.bench.prompt_sets import read_set
from d3d.lab.bench.scorers import (
    boxed,
    code_of,
    final_number,
    runs_through,
    same_value,
    score,
)
from d3d.train.prompt_rows import read_rows

NUMBER = {"kind": "number", "answer": "1,080"}
MATH = {"kind": "math", "answer": "\\frac{3}{4}"}


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        ("So it is \\boxed{1080}.", True),
        ("So it is \\boxed{1,080} dollars, after 3 days.", True),
        ("2 * 540 = 1080", True),
        ("1080.0", True),
        ("\\boxed{\\$1080}", True),
        ("1080 of them, not 12", False),
        ("\\boxed{12} or 1080", False),
        ("I don't know.", False),
        ("", False),
    ],
)
def test_numbers(answer: str, right: bool) -> None:
    assert score(answer, NUMBER) is right


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        ("\\boxed{\\frac{3}{4}}", True),
        ("\\boxed{\\dfrac34}", True),
        ("\\boxed{0.75}", True),
        ("\\boxed{3/4}", True),
        ("\\boxed{x = \\frac{3}{4}.}", True),
        ("\\boxed{\\frac{4}{3}}", False),
        ("\\frac{3}{4}", False),
        ("\\boxed{\\frac{3}{4}", False),
    ],
)
def test_maths(answer: str, right: bool) -> None:
    assert score(answer, MATH) is right


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("\\left( 3, \\frac{\\pi}{2} \\right)", "(3,\\frac{\\pi}{2})", True),
        ("90^\\circ", "90", True),
        ("\\text{Evelyn}", "Evelyn", True),
        ("12,345", "12345", True),
        ("(1,2)", "(1,3)", False),
        ("-\\frac{1}{2}", "-0.5", True),
        ("\\frac{1}{0}", "1", False),
        ("p - q", "p-q", True),
    ],
)
def test_two_ways_to_write_it(one: str, other: str, same: bool) -> None:
    assert same_value(one, other) is same


def test_the_last_box_counts_with_its_braces() -> None:
    assert boxed("\\boxed{1} then \\boxed{\\sqrt{\\frac{a}{b}}}!") == "\\sqrt{\\frac{a}{b}}"
    assert boxed("none") is None
    assert final_number("from 3 to -4.5") == "-4.5"


def test_the_bundled_tasks_own_solutions_pass_and_others_do_not() -> None:
    from importlib import resources

    rows = read_rows(str(resources.files("d3d").joinpath("assets/mini_prompts.jsonl"))).rows
    references = {prompt.prompt_id: prompt.reference for prompt in read_set("mini").prompts}
    solved = 0
    for _, row in rows:
        if row["like"] not in ("humaneval", "mbpp"):
            continue
        reference = references[f"{row['like']}-{row['task_id']}"]
        solution = row.get("canonical_solution") or row["code"]
        assert (
            score(
                f"Here:\n```python\n{row.get('prompt', '')}{solution}\n```\nDone.",
                reference,
                run_code=True,
            )
            is True
        )
        assert (
            score(f"```python\n{row.get('prompt', '')}    return 17\n```", reference, run_code=True)
            is False
        )
        assert score(solution, reference) is None
        solved += 1
    assert solved == 4


def test_a_continuation_of_the_function_is_a_solution_too() -> None:
    reference: dict[str, Any] = {
        "kind": "humaneval",
        "entry_point": "double",
        "prompt": "import math\n\ndef helper(x):\n    return 2 * x\n\n"
        'def double(x):\n    """Twice x."""\n',
        "test": "def check(candidate):\n    assert candidate(math.floor(4.5)) == 8\n",
    }
    assert score("    return helper(x)\n", reference, run_code=True) is True
    assert (
        score("```python\ndef double(x):\n    return helper(x)\n```", reference, run_code=True)
        is True
    )
    assert (
        score("```python\ndef double(x):\n    return helper(x\n```", reference, run_code=True)
        is False
    )


def test_the_block_that_defines_something_is_the_code() -> None:
    assert code_of("```\npip install x\n```\n```python\ndef f(): ...\n```") == "def f(): ...\n"
    assert code_of("def f(): ...") == "def f(): ..."
    assert code_of("```python\ndef f(): ...") == "def f(): ..."


@pytest.mark.parametrize(
    "program",
    [
        "raise SystemExit(0)",
        "import os; os._exit(0)",
        "assert False",
        "x = 'a' * (3 << 30)",
        "import socket; socket.create_connection(('127.0.0.1', 9))",
        "import subprocess; subprocess.run(['true'])",
        "import os; os.system('true')",
        "open('x', 'w').write('x')",
        "print('x' * (1 << 22))",
        "import os; assert os.environ.get('PATH')",
    ],
)
def test_what_must_not_be_is_no_success(program: str) -> None:
    assert runs_through(program) is False


def test_a_program_that_ends_is_a_success() -> None:
    assert (
        runs_through("import math, collections\nprint('hello', end='')\nassert math.pi > 3") is True
    )


def test_an_endless_program_is_stopped() -> None:
    started = time.monotonic()
    assert runs_through("while True: pass", timeout_s=1.0) is False
    assert runs_through("import time; time.sleep(60)", timeout_s=1.0) is False
    assert time.monotonic() - started < 30
