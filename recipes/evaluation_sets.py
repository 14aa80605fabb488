"""Write the fingerprints by which `d3d data` recognises the problems of evaluation sets.

usage: python recipes/evaluation_sets.py DATA OUT

DATA holds the public sets as their repositories publish them: gsm8k/test.jsonl
(openai/grade-school-math), math500/test.jsonl (hkust-nlp/simpleRL-reason), aime25/aime25.jsonl
(QwenLM/QwQ), humaneval/HumanEval.jsonl.gz (openai/human-eval), mbpp/mbpp.jsonl (google-research),
livecodebench/livecodebench_release_v6_prompts.jsonl (deepseek-ai/DeepSpec), mt_bench/question.jsonl
(lm-sys/FastChat). OUT is src/d3d/assets/evaluation_sets.npz. Hashes only: no text can be got back
from it."""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path

import numpy as np

from d3d.train.evaluation_sets import SETS, fingerprint, without_formats

CANARY = "Seven invented herons count their own feathers twice a day, and nobody asks them why."
"""No problem of anybody's: a test looks whether the file still fits the way in which texts are
normalised."""


def rows(path: Path) -> list[dict]:
    content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    return [json.loads(line) for line in content.decode("utf-8").split("\n") if line.strip()]


def function(task: dict) -> str:
    """The function to write, without imports and helpers before it, which go first when people
    reformat a prompt."""
    return task["prompt"][task["prompt"].rindex(f"def {task['entry_point']}") :]


def question(task: dict) -> str:
    return task["turns"][0].split("### Question:\n", 1)[1].split("\n\n### Format:", 1)[0]


def main(data: Path, out: Path) -> None:
    problems = {
        "gsm8k": [row["question"] for row in rows(data / "gsm8k/test.jsonl")],
        "math500": [row["problem"] for row in rows(data / "math500/test.jsonl")],
        "aime25": [without_formats(row["prompt"]) for row in rows(data / "aime25/aime25.jsonl")],
        "humaneval": [function(row) for row in rows(data / "humaneval/HumanEval.jsonl.gz")],
        "mbpp": [
            row["text"] for row in rows(data / "mbpp/mbpp.jsonl") if 11 <= row["task_id"] <= 510
        ],
        "livecodebench": [
            question(row)
            for row in rows(data / "livecodebench/livecodebench_release_v6_prompts.jsonl")
        ],
        "mt_bench": [row["turns"][0] for row in rows(data / "mt_bench/question.jsonl")],
    }
    assert problems.keys() == SETS.keys()
    np.savez(
        out,
        canary=fingerprint([CANARY]),
        **{name: fingerprint(texts) for name, texts in problems.items()},
    )
    print(
        f"{out}: {out.stat().st_size} bytes,",
        ", ".join(f"{name} {len(texts)}" for name, texts in problems.items()),
    )


if __name__ == "__main__":
    if len(sys.argv) != 3:
        raise SystemExit(__doc__)
    main(Path(sys.argv[1]), Path(sys.argv[2]))
