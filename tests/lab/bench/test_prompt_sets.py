"""Sets are read with their templates, a part of them is drawn by seed, and what is no set is
refused."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from d3d.errors import InvalidRequest
from d3d.lab.bench.prompt_sets import SETS, read_set

BOXED = "\nPlease reason step by step, and put your final answer within \\boxed{}."

ROWS: dict[str, dict[str, Any]] = {
    "gsm8k": {"question": "How many?", "answer": "two\n#### 2"},
    "math500": {"problem": "Find $x$.", "answer": "\\frac12", "unique_id": "test/a/1.json"},
    "aime25": {"prompt": "Sum?" + BOXED, "answer": 70},
    "humaneval": {
        "task_id": "HumanEval/0",
        "prompt": "def f():\n",
        "entry_point": "f",
        "test": "def check(c): ...",
        "canonical_solution": "",
    },
    "mbpp": {
        "task_id": 11,
        "text": "Write f.",
        "code": "",
        "test_list": ["assert f() == 1", "assert f()"],
        "test_setup_code": "",
    },
    "livecodebench": {"turns": ["Write a program."]},
    "mt_bench": {
        "question_id": 81,
        "category": "writing",
        "turns": ["Write a post.", "Rewrite it."],
    },
}
ASKED = {
    "gsm8k": "How many?" + BOXED,
    "math500": "Find $x$." + BOXED,
    "aime25": "Sum?" + BOXED,
    "humaneval": "Write a solution to the following problem and make sure that it passes the "
    "tests:\n```python\ndef f():\n\n```",
    "mbpp": "You are an expert Python programmer, and here is your task: Write f. "
    "Your code should pass these tests:\n\nassert f() == 1\nassert f()",
    "livecodebench": "Write a program.",
    "mt_bench": "Write a post.",
}


def written(directory: Path, name: str, rows: list[dict[str, Any]]) -> Path:
    file = directory / SETS[name].files[0]
    file.parent.mkdir(parents=True, exist_ok=True)
    content = "".join(json.dumps(row) + "\n" for row in rows).encode()
    file.write_bytes(gzip.compress(content) if file.suffix == ".gz" else content)
    return directory


@pytest.mark.parametrize("name", ROWS)
def test_each_set_is_asked_with_its_template(name: str, tmp_path: Path) -> None:
    (prompt,) = read_set(name, written(tmp_path, name, [ROWS[name]])).prompts
    assert prompt.messages == ({"role": "user", "content": ASKED[name]},)
    assert prompt.set_name == name
    assert (prompt.reference is None) == (name in ("livecodebench", "mt_bench"))


def test_ids_and_references(tmp_path: Path) -> None:
    ids, references = {}, {}
    for name, row in ROWS.items():
        (prompt,) = read_set(name, written(tmp_path, name, [row])).prompts
        ids[name], references[name] = prompt.prompt_id, prompt.reference
    assert ids == dict(
        zip(ROWS, ["0", "test/a/1.json", "0", "HumanEval/0", "11", "0", "81"], strict=True)
    )
    assert references["gsm8k"] == {"kind": "number", "answer": "2"}
    assert references["aime25"] == {"kind": "number", "answer": "70"}
    assert references["mbpp"] == {
        "kind": "mbpp",
        "tests": ["assert f() == 1", "assert f()"],
        "setup": "",
    }


def test_the_second_turn_follows_the_answer_to_the_first(tmp_path: Path) -> None:
    (prompt,) = read_set("mt_bench", written(tmp_path, "mt_bench", [ROWS["mt_bench"]])).prompts
    assert prompt.num_turns == 2
    assert prompt.conversation([]) == [{"role": "user", "content": "Write a post."}]
    assert prompt.conversation(["Here."])[1:] == [
        {"role": "assistant", "content": "Here."},
        {"role": "user", "content": "Rewrite it."},
    ]


def test_only_the_test_tasks_of_mbpp_are_asked(tmp_path: Path) -> None:
    rows = [ROWS["mbpp"] | {"task_id": task} for task in (10, 11, 510, 511, 974)]
    assert [
        prompt.prompt_id for prompt in read_set("mbpp", written(tmp_path, "mbpp", rows)).prompts
    ] == ["11", "510"]


def test_a_subset_is_drawn_by_seed_and_a_larger_one_begins_with_it(tmp_path: Path) -> None:
    data = written(tmp_path, "gsm8k", [ROWS["gsm8k"] | {"question": str(n)} for n in range(50)])

    def drawn(limit: int | None, seed: int = 0) -> list[str]:
        return [
            prompt.prompt_id for prompt in read_set("gsm8k", data, limit=limit, seed=seed).prompts
        ]

    assert drawn(None) == [str(n) for n in range(50)]
    assert drawn(10) == drawn(20)[:10] == drawn(10)
    assert len(set(drawn(10))) == 10
    assert drawn(10) != drawn(10, seed=1)
    assert read_set("gsm8k", data, limit=10).available == 50


def test_the_bundled_set_has_every_kind_and_needs_no_files() -> None:
    mini = read_set("mini")
    assert len(mini.prompts) == 12
    kinds = {prompt.prompt_id.split("-")[0] for prompt in mini.prompts}
    assert kinds == {"gsm8k", "math500", "humaneval", "mbpp", "livecodebench", "mt_bench"}
    assert sum(prompt.num_turns == 2 for prompt in mini.prompts) == 2


def test_own_prompts(tmp_path: Path) -> None:
    file = tmp_path / "mine.jsonl"
    file.write_text(
        '{"prompt": "Hi."}\n{"id": "x", "turns": ["One.", "Two."]}\n'
        '{"messages": [{"role": "user", "content": "Yo."}]}\n'
    )
    mine = read_set(str(file))
    assert mine.name == "mine"
    assert [prompt.prompt_id for prompt in mine.prompts] == ["0", "x", "2"]
    assert [prompt.num_turns for prompt in mine.prompts] == [1, 2, 1]


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("nope", "there is no set of this name"),
        ("nope=x.jsonl", "there is no set of this name"),
        ("gsm8k", "--data"),
        ("gsm8k=missing.jsonl", "no such file"),
        ("other.jsonl", "no such file"),
    ],
)
def test_what_is_not_there_is_refused(spec: str, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        read_set(spec)


def test_rows_of_another_kind_are_refused_by_their_line(tmp_path: Path) -> None:
    file = tmp_path / "x.jsonl"
    file.write_text(json.dumps(ROWS["gsm8k"]) + "\n" + json.dumps(ROWS["mt_bench"]) + "\n")
    with pytest.raises(InvalidRequest, match="line 2: not a row of gsm8k"):
        read_set(f"gsm8k={file}")
    file.write_text('{"id": 1, "prompt": "a"}\n{"id": 1, "prompt": "b"}\n')
    with pytest.raises(InvalidRequest, match="two prompts '1'"):
        read_set(str(file))
    file.write_text("")
    with pytest.raises(InvalidRequest, match="no prompt"):
        read_set(str(file))
    with pytest.raises(InvalidRequest, match="holds none of"):
        read_set("mbpp", tmp_path)
