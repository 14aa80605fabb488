"""The usual ways in which benchmarks ask for an answer's format, so that a drafter meets them in
training.

A format is a text with `{prompt}` in it, or a plain suffix. Which prompts get it is drawn for each
prompt by itself, so neither the order of a file nor a limit moves it."""

from __future__ import annotations

import hashlib

PLACE = "{prompt}"

FORMATS = {
    "boxed": "{prompt}\nPlease reason step by step, and put your final answer within \\boxed{}.",
    "steps": "{prompt}\nLet's think step by step.",
    "code": "Write a solution to the following problem and make sure that it passes the tests:\n```python\n{prompt}\n```",
}
"""By name. `boxed` and `code` are those of DFlash's benchmark script (z-lab/dflash, benchmark.py),
for maths and for HumanEval."""


def format_text(name_or_text: str) -> str:
    """The text of a named format; another text is a suffix, unless it says itself where the prompt
    goes. Empty: none."""
    text = FORMATS.get(name_or_text, name_or_text)
    return text if PLACE in text else PLACE + text


def apply_format(text: str, prompt: str) -> str:
    return text.replace(PLACE, prompt, 1)


def is_drawn(token_ids: list[int], share: float, seed: int) -> bool:
    """Whether this prompt (its ids without a format) is among the `share` of prompts that get
    one."""
    digest = hashlib.sha256(f"format {seed} {token_ids}".encode()).digest()
    return int.from_bytes(digest[:8], "big") < share * 2.0**64


def without_formats(text: str) -> str:
    """The prompt itself, where a text is one in a named format."""
    text = text.strip()
    for form in FORMATS.values():
        before, after = form.split(PLACE)
        if text.startswith(before.strip()) and text.endswith(after.strip()):
            text = text[len(before.strip()) : len(text) - len(after.strip())].strip()
    return text
