"""`d3d export` as a user's shell sees it."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from support.command import d3d
from support.tiny_model import write_tiny_drafter, write_tiny_target


def test_it_prints_the_directory_and_says_what_is_lost(tiny_drafter: Path, tmp_path: Path) -> None:
    outcome = d3d("export", tiny_drafter, tmp_path / "out")
    assert (outcome.code, outcome.out) == (0, f"{tmp_path / 'out'}\n"), outcome.err
    warning, summary = outcome.err.splitlines()
    assert warning.startswith("warning: The drafter's deltas act at slots only")
    assert summary == "float32, 302 tokens, masked places are token id 300"
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").config.vocab_size == 302


def test_options(tiny_target: Path, tmp_path: Path) -> None:
    target = write_tiny_target(tmp_path / "target")
    drafter = write_tiny_drafter(tmp_path / "drafter", target, scope="all")
    target.rename(tmp_path / "moved")
    more = ("--target", tmp_path / "moved", "--dtype", "bfloat16", "--mask-token-id", 301)
    outcome = d3d("export", drafter, tmp_path / "out", *more)
    assert outcome.code == 0, outcome.err
    assert outcome.err == "bfloat16, 302 tokens, masked places are token id 301\n"


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (("--dtype", "int4"), "use auto, float32, bfloat16, float16"),
        (("--mask-token-id", -1), "--mask-token-id"),
        (("--mask-token-id", 0), "end-of-answer"),
        (("--target", "nonsense"), "no model 'nonsense'"),
    ],
)
def test_what_is_refused(
    more: tuple[object, ...], words: str, tiny_drafter: Path, tmp_path: Path
) -> None:
    assert d3d("export", tiny_drafter, tmp_path / "out", *more).is_refusal(words)
    assert list(tmp_path.iterdir()) == []


def test_a_full_directory_and_something_else_than_a_drafter_are_refused(
    tiny_target: Path, tiny_drafter: Path, tmp_path: Path
) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    assert d3d("export", tiny_drafter, tmp_path).is_refusal("exists already")
    assert d3d("export", tiny_target, tmp_path / "out").is_refusal(
        "not a d3d drafter but a plain llama model"
    )
    assert d3d("export", "nothing-there", tmp_path / "out").is_refusal("no drafter 'nothing-there'")
