"""Write the training prompts of the SmolLM2-135M drafter as JSON lines.

usage: python prompts.py DATA OUT

DATA holds the public sets as their repositories publish them: gsm8k/train.jsonl
(openai/grade-school-math), math_test5000/test.jsonl (hendrycks/math, test split),
math500/test.jsonl, mbpp/mbpp.jsonl, self_instruct/*.jsonl (yizhongw/self-instruct). Nothing of an
evaluation set is used: MATH-500 is taken out of MATH, and of MBPP only the training tasks 601 to
974 are read."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path

BOXED = "\nPlease reason step by step, and put your final answer within \\boxed{}."
CODE = (
    "Write a solution to the following problem and make sure that it passes the tests:\n"
    "```python\n{}\n```"
)
SEED = 0


def rows(path: Path) -> list[dict]:
    return [
        json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()
    ]


def with_and_without(texts: list[str], suffix: str) -> Iterator[str]:
    """Every other text gets the suffix with which benchmarks ask for an answer's format."""
    for number, text in enumerate(texts):
        yield text + (suffix if number % 2 else "")


def code_tasks(tasks: list[dict]) -> Iterator[str]:
    """Each task in words, and as the opening of a function with its docstring."""
    for task in tasks:
        yield f"{task['text']}\nYour code should pass this test:\n{task['test_list'][0]}"
        name = task["test_list"][0].removeprefix("assert ").split("(")[0].strip()
        header = next(
            (
                line.strip()
                for line in task["code"].splitlines()
                if line.strip().startswith(f"def {name}")
            ),
            None,
        )
        if header:
            test = task["test_list"][0].removeprefix("assert ")
            yield CODE.format(f'{header}\n    """ {task["text"]}\n    >>> {test}\n    """')


def chat_tasks(tasks: list[dict]) -> Iterator[str]:
    for task in tasks:
        given = task["instances"][0]["input"].strip()
        yield task["instruction"].strip() + (f"\n\n{given}" if given else "")


def main(data: Path, out: Path) -> None:
    held_out = {row["problem"].strip() for row in rows(data / "math500/test.jsonl")}
    maths = [
        row["problem"].strip()
        for row in rows(data / "math_test5000/test.jsonl")
        if row["problem"].strip() not in held_out
    ]
    words = [row["question"].strip() for row in rows(data / "gsm8k/train.jsonl")]
    for texts in (maths, words):
        random.Random(SEED).shuffle(texts)
    code = [row for row in rows(data / "mbpp/mbpp.jsonl") if 601 <= row["task_id"] <= 974]
    chat = rows(data / "self_instruct/seed_tasks.jsonl") + rows(
        data / "self_instruct/user_oriented_instructions.jsonl"
    )
    sets = {
        "gsm8k": with_and_without(words, BOXED),
        "math": with_and_without(maths, BOXED),
        "mbpp": code_tasks(code),
        "chat": chat_tasks(chat),
    }
    out.mkdir(parents=True, exist_ok=True)
    for name, prompts in sets.items():
        lines = [json.dumps({"prompt": prompt}) + "\n" for prompt in prompts]
        (out / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
        print(f"{out / name}.jsonl: {len(lines)} prompts")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        raise SystemExit(__doc__)
    main(Path(sys.argv[1]), Path(sys.argv[2]))
