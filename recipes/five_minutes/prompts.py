"""Write self-written prompts for the five-minute chain of docs/training.md: some to train on, and
others to measure with.

usage: python prompts.py OUT
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

NAMES = ("Ada", "Ben", "Chloe", "Dan", "Ella", "Finn", "Grace", "Hugo")
THINGS = ("apples", "books", "pencils", "shells", "stamps", "marbles", "cards", "coins")
TOPICS = (
    "rain",
    "bread",
    "bees",
    "trees",
    "the moon",
    "rivers",
    "cats",
    "winter",
    "music",
    "maps",
    "salt",
    "clouds",
)
ASKED = (
    "{name} has {a} {thing} and gets {b} more. How many {thing} does {name} have now?",
    "{name} shares {a} {thing} equally among {b} friends. How many does each friend get?",
    "Write a Python function that adds {a} to a number and multiplies the result by {b}.",
    "Tell me three facts about {topic}.",
    "Explain {topic} to a child in two sentences.",
)
HELD_OUT = 12


def prompts(count: int, seed: int) -> list[str]:
    """Different prompts, drawn from all kinds; about topics there are few, so those with numbers
    are more."""
    draw, found = random.Random(seed), dict[str, None]()
    while len(found) < count:
        given = {
            "name": draw.choice(NAMES),
            "thing": draw.choice(THINGS),
            "topic": draw.choice(TOPICS),
        }
        found[
            draw.choice(ASKED).format(a=draw.randrange(2, 60), b=draw.randrange(2, 12), **given)
        ] = None
    return list(found)


def main(out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    texts = prompts(120 + HELD_OUT, seed=0)
    for name, part in (("train", texts[HELD_OUT:]), ("heldout", texts[:HELD_OUT])):
        lines = "".join(json.dumps({"prompt": text}) + "\n" for text in part)
        (out / f"{name}.jsonl").write_text(lines, encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
