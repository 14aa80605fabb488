"""Write chat prompts that a model makes up itself, as JSON lines: it is shown the opening of a
user's turn, and samples how it goes on.

usage: python self_prompts.py OUT [--target smollm2-135m] [--count 1200] [--seed 0]

Self-instruct has some four hundred chat prompts; a drafter that is to draft chat needs to see more
of it. The idea of asking an instruction-tuned model for the user's side of its own chat template is
that of Magpie (arXiv 2406.08464). Here each prompt is begun with one of the words below, so that
prompts differ. Made-up prompts may be odd; their answers are the target's own all the same, and
those are what a drafter learns."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import d3d

OPENINGS = (
    """
Write a, Write an, Explain, Explain how, Explain why, What is, What are, How do I, How does, How
can I, Why, Who was, Describe, Imagine, Compare, List, Give me, Tell me, Summarize, Translate,
Rewrite, Suggest, Create a, Design a, Compose, Draft, Discuss, Help me, Can you, Could you, I
need, I am, I want to, My, You are a, Pretend that, If, When, Where, Which, Should, Is it, Are
there, Convert, Calculate, Solve, Find, Classify, Identify, Analyze, Write a Python function that,
Write a story, Write a poem, Write an email, Plan a, Outline, Name, Define, In, The, A
""".strip()
    .replace("\n", " ")
    .split(", ")
)
SHORTEST, LONGEST = 20, 600
"""Characters of a prompt that is kept."""


def opening_ids(model: d3d.Model, opening: str) -> list[int]:
    """The chat template up to where a user's turn has begun with `opening`."""
    mark = "\N{REPLACEMENT CHARACTER}"
    text = str(
        model.tokenizer.apply_chat_template([{"role": "user", "content": mark}], tokenize=False)
    )
    return list(
        model.tokenizer.encode(text[: text.index(mark)] + opening, add_special_tokens=False)
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--count", type=int, default=1200)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    model = d3d.load(arguments.target)
    openings = [opening_ids(model, opening) for opening in OPENINGS]
    prompts: dict[str, None] = {}  # in their order, each once
    seed = arguments.seed
    while len(prompts) < arguments.count:
        results = model.generate_many(
            openings, mode="plain", temperature=1.0, top_p=0.95, seed=seed, max_tokens=120
        )
        for opening, result in zip(OPENINGS, results, strict=True):
            prompt = (opening + result.text).strip()
            if result.finish_reason == "stop" and SHORTEST <= len(prompt) <= LONGEST:
                prompts[prompt] = None
        seed += 1
        print(f"{len(prompts)} of {arguments.count} prompts", flush=True)
    lines = [
        json.dumps({"prompt": prompt}, ensure_ascii=False) + "\n"
        for prompt in list(prompts)[: arguments.count]
    ]
    arguments.out.write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
