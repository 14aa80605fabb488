"""Problems of evaluation sets are recognised in whatever they are wrapped, and what is none is left
alone."""

from __future__ import annotations

import json
import runpy
from importlib import resources
from pathlib import Path

import numpy as np
import pytest

from d3d.errors import InvalidRequest
from d3d.train import prompts as prompts_module
from d3d.train.evaluation_sets import (
    FORMATS,
    SETS,
    EvaluationSets,
    fingerprint,
    known_sets,
)
from d3d.train.prompts import Drawn, PromptOptions, draw_prompts
from support.tiny_model import tiny_tokenizer

ROOT = Path(__file__).parents[2]

PROBLEM = (
    "Ada\u2019s hens lay 7 eggs a day \u2014 she sells $\\frac{3}{7}$ of them. How many are left "
    "after 3 days?"
)
SHORT = "Compute $5! - 3$."
CODE = (
    'def halve(n: int) -> int:\n    """Half of n, rounded down.\n    >>> halve(7)\n    3\n    """\n'
)
INVENTED = EvaluationSets(
    {
        "gsm8k": fingerprint([PROBLEM]),
        "math500": fingerprint([SHORT]),
        "humaneval": fingerprint([CODE]),
    }
)


@pytest.mark.parametrize(
    "form",
    [
        *FORMATS.values(),
        "{prompt}",
        "Question: {prompt}\nAnswer:",
        "Some shots.\n\n{prompt} Be brief!",
    ],
)
@pytest.mark.parametrize(
    "problem",
    [
        PROBLEM,
        PROBLEM.upper(),
        PROBLEM.replace("\u2019", "'").replace("\u2014", "-"),
        PROBLEM.replace(" ", "\n  "),
        PROBLEM.replace("\\frac{3}{7}", "\\frac 3 7").replace("$", ""),
        PROBLEM.rstrip("?"),
    ],
)
def test_a_problem_is_found_whatever_stands_around_it(problem: str, form: str) -> None:
    assert INVENTED.find(form.replace("{prompt}", problem)) == "gsm8k"


@pytest.mark.parametrize(
    "text", [CODE, f"from typing import List\n\n\n{CODE}", f"Complete:\n```python\n{CODE}```"]
)
def test_code_is_found_too(text: str) -> None:
    assert INVENTED.find(text) == "humaneval"


@pytest.mark.parametrize("form", ["{prompt}", *FORMATS.values()])
def test_a_short_problem_must_be_the_whole_text(form: str) -> None:
    assert INVENTED.find(form.replace("{prompt}", " compute 5! - 3 ")) == "math500"
    assert INVENTED.find(form.replace("{prompt}", "First compute 5! - 3, then its square.")) is None
    assert INVENTED.find(form.replace("{prompt}", "Compute 5! + 3.")) is None


@pytest.mark.parametrize(
    "text",
    [
        "",
        "?",
        "hello",
        PROBLEM.replace("7 eggs", "8 eggs"),
        PROBLEM[:60],
        PROBLEM[20:],
        "Compute 5!",
    ],
)
def test_another_text_is_not_taken_for_a_problem(text: str) -> None:
    assert INVENTED.find(text) is None


def test_the_package_knows_every_problem_of_every_set() -> None:
    file = resources.files("d3d").joinpath("assets/evaluation_sets.npz")
    with file.open("rb") as stored, np.load(stored) as archive:
        sizes = {name: len(archive[name]) for name in archive.files}
        canary = archive["canary"]
        assert len(np.unique(np.concatenate([archive[name]["digest"] for name in SETS]))) > 3600
    assert sizes == {
        "canary": 1,
        "gsm8k": 1319,
        "math500": 500,
        "aime25": 30,
        "humaneval": 164,
        "mbpp": 500,
        "livecodebench": 1055,
        "mt_bench": 80,
    }
    assert Path(str(file)).stat().st_size < 60_000
    text = runpy.run_path(str(ROOT / "recipes" / "evaluation_sets.py"))["CANARY"]
    assert EvaluationSets({"canary": canary}).find(f"Tell me: {text}") == "canary", (
        "texts are normalised as when the file was made"
    )
    assert known_sets().find(text) is None


# What `draw_prompts` makes of it


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompts_module, "known_sets", lambda: INVENTED)


def draw(path: Path, how: str, exclude: list[str] | None = None) -> Drawn:
    rows = [
        {"prompt": "hello"},
        {"prompt": f"Q: {PROBLEM}"},
        {"turns": ["hi", SHORT]},
        {"messages": [{"role": "user", "content": PROBLEM}]},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return draw_prompts(
        [str(path)], tiny_tokenizer(), PromptOptions(evaluation_prompts=how), exclude=exclude or []
    )  # type: ignore[arg-type]


def test_problems_are_refused_by_file_line_and_set(known: None, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest) as caught:
        draw(tmp_path / "p.jsonl", "refuse")
    assert f"{tmp_path / 'p.jsonl'}, line 2: this is a problem of GSM8K test" in str(caught.value)
    assert "(2 of GSM8K test, 1 of MATH-500 in all)" in str(caught.value)
    assert "--skip-evaluation-prompts" in str(caught.value)


def test_problems_may_be_skipped_or_taken(known: None, tmp_path: Path) -> None:
    skipped = draw(tmp_path / "p.jsonl", "skip")
    assert len(skipped.prompts) == 1
    assert skipped.left_out.counts == {
        "a problem of GSM8K test, an evaluation set": 2,
        "a problem of MATH-500, an evaluation set": 1,
    }
    taken = draw(tmp_path / "p.jsonl", "allow")
    assert len(taken.prompts) == 4
    assert taken.evaluation.counts == {"gsm8k": 2, "math500": 1}
    assert taken.left_out.counts == {}


def test_what_is_excluded_is_not_refused(known: None, tmp_path: Path) -> None:
    barred = tmp_path / "barred.jsonl"
    rows = [{"prompt": f"Q: {PROBLEM}"}, {"prompt": PROBLEM}, {"turns": ["hi", SHORT]}]
    barred.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert len(draw(tmp_path / "p.jsonl", "refuse", [str(barred)]).prompts) == 1
