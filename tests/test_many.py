"""`generate_many` and `stream_many`: each answer is the one that its prompt gets alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import d3d
from d3d.api import Model
from d3d.errors import InvalidRequest

PROMPTS: list[Any] = [
    "hello",
    [{"role": "user", "content": "how much is two and two? " * 4}],
    [5 + index % 90 for index in range(70)],
    "why?",
    "how are you?",
]
PER_PROMPT: list[dict[str, Any]] = [
    {},
    {"max_tokens": 7},
    {"temperature": 1.0, "seed": 3},
    {"max_tokens": 1},
    {"stop_token_ids": (60, 61, 62)},
]
SHARED = {"max_tokens": 20, "ignore_eos": True}
SEEDED = {"temperature": 0.9, "seed": 11, "top_p": 0.95, "repetition_penalty": 1.2}


@pytest.fixture(scope="module")
def model(tiny_target: Path, tiny_drafter: Path) -> Iterator[Model]:
    loaded = d3d.load(str(tiny_target), tiny_drafter, device="cpu", dtype="float32")
    yield loaded
    loaded.close()


@pytest.mark.parametrize("sampling", [{}, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("mode", ["plain", "serial", "fused", "async"])
def test_each_answer_is_what_generate_gives(
    mode: str, sampling: dict[str, Any], model: Model
) -> None:
    options: dict[str, Any] = {"mode": mode, **SHARED, **sampling}
    together = model.generate_many(PROMPTS, max_batch=2, per_prompt=PER_PROMPT, **options)
    assert len(together) == len(PROMPTS)
    for result, prompt, own in zip(together, PROMPTS, PER_PROMPT, strict=True):
        alone = model.generate(prompt, **{**options, **own, "mode": "plain"})
        assert result.token_ids == alone.token_ids
        assert (result.text, result.finish_reason, result.seed) == (
            alone.text,
            alone.finish_reason,
            alone.seed,
        )
        assert result.usage == alone.usage
        assert (result.speculation is None) == (mode == "plain")
        if result.speculation is not None:
            assert result.speculation.mode == mode
            assert not [note for note in result.speculation.warnings if "drafting stopped" in note]
    assert [len(result.token_ids) for result in together[:4]] == [20, 7, 20, 1]


def test_the_options_of_a_mode_are_for_all(model: Model) -> None:
    together = model.generate_many(["hello", "why?"], mode="serial", draft_length=3, max_tokens=12)
    assert all(
        result.speculation is not None and result.speculation.draft_length == 3
        for result in together
    )
    assert together[0].token_ids == model.generate("hello", mode="plain", max_tokens=12).token_ids


def test_pieces_come_as_they_are_made_and_join_to_the_results(model: Model) -> None:
    texts = [""] * 3
    results: dict[int, Any] = {}
    begun: list[int] = []
    for index, chunk in model.stream_many(
        ["hello", "why?", "how are you?"],
        max_batch=2,
        per_prompt=[{"max_tokens": 4}, {}, {}],
        **SHARED,
    ):
        if index not in begun:
            begun.append(index)
            assert len(chunk.token_ids) == 1, "the first token of each comes at once"
        assert index not in results
        texts[index] += chunk.text
        if chunk.result is not None:
            results[index] = chunk.result
    assert begun == [0, 1, 2]
    assert next(iter(results)) == 0, "the short one ends first, and the third takes its place"
    assert [results[index].text for index in range(3)] == texts
    assert results[2].timing.ttft_s > results[1].timing.ttft_s, "it waited for a place"


def test_no_prompts_are_no_answers(model: Model) -> None:
    assert model.generate_many([]) == []
    assert list(model.stream_many([])) == []


@pytest.mark.parametrize(
    ("prompts", "options", "words"),
    [
        ("hello", {}, "prompts: give a list of prompts, not str"),
        (["hello", "  "], {}, "prompts[1]: it is empty"),
        (["hello", [1, 99999]], {}, "prompts[1]: token id 99999"),
        ([5, 6], {}, "prompts[0]: give text, a list of messages"),
        (["hello", list(range(3, 250)) * 2], {}, "prompts[1]: 494 tokens leave no room"),
        (["hello", "why?"], {"per_prompt": [{}]}, "per_prompt: it has 1 entries for 2 prompts"),
        (["hello"], {"per_prompt": [None]}, "per_prompt: [None] is not a list of mappings"),
        (["hello", "why?"], {"per_prompt": [{}, {"temperature": -1}]}, "prompts[1]: temperature"),
        (
            ["hello", "why?"],
            {"per_prompt": [{}, {"draft_length": 2}]},
            "prompts[1]: draft_length: there is no such key",
        ),
        (["hello"], {"temprature": 1.0}, "prompts[0]: temprature: there is no such key"),
        (["hello"], {"max_batch": 0}, "max_batch: 0 is not a whole number of 1 or more"),
        (["hello"], {"max_batch": 2.5}, "max_batch: 2.5"),
        (
            ["hello"],
            {"mode": "turbo"},
            "method: 'turbo' is not one of plain, serial, fused, async",
        ),
        (
            ["hello"],
            {"mode": "plain", "draft_length": 2},
            "draft_length: method plain has no such option",
        ),
        (["hello"], {"draft_length": 7}, "draft_length: 7"),
    ],
    ids=str,
)
def test_what_can_not_be_is_refused_by_name_before_anything_runs(
    prompts: Any, options: dict[str, Any], words: str, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "d3d.model.transformer.Transformer.hidden", lambda *_: pytest.fail("something was computed")
    )
    with pytest.raises(InvalidRequest) as caught:
        model.stream_many(prompts, **options)
    assert str(caught.value).startswith(words)
