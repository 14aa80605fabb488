"""Prompts out of JSON lines, and the target's answers to them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from d3d.errors import InvalidRequest
from d3d.hub.open_model import OpenModel
from d3d.train.answers import Answering, AnswerOptions, prompt_seed
from d3d.train.corpus import Sample, answer_key
from d3d.train.evaluation_sets import FORMATS, without_formats
from d3d.train.prompts import (
    Drawn,
    LeftOut,
    PromptOptions,
    TrainingPrompt,
    draw_prompts,
    read_prompts,
)
from support.tiny_model import CONTEXT, open_tiny

BOXED = "\nPlease reason step by step, and put your final answer within \\boxed{}."


@pytest.fixture(scope="module")
def base(tiny_target: Path) -> OpenModel:
    return open_tiny(tiny_target)


def write(path: Path, *rows: Any) -> Path:
    path.write_text(
        "".join(
            (row if isinstance(row, str) else json.dumps(row, ensure_ascii=False)) + "\n"
            for row in rows
        ),
        encoding="utf-8",
    )
    return path


def shown(base: OpenModel, prompts: list[TrainingPrompt]) -> list[str]:
    """The prompts as the template has made them, without the turn that begins the answer."""
    return [
        base.tokenizer.decode(prompt.token_ids).removesuffix("<|im_start|>assistant\n")
        for prompt in prompts
    ]


def user(text: str) -> str:
    return f"<|im_start|>user\n{text}<|im_end|>\n"


@pytest.mark.parametrize(
    ("row", "text"),
    [
        ({"prompt": "a"}, user("a")),
        ({"question": " a ", "answer": "b"}, user("a")),
        ({"problem": "a"}, user("a")),
        ({"instruction": "a", "instances": [{"input": "b"}]}, user("a\n\nb")),
        ({"instruction": "a", "instances": [{"input": None}]}, user("a")),
        ({"instruction": "a", "instances": [None]}, user("a")),
        ({"text": "a"}, user("a")),
        ({"turns": ["a", "b"]}, user("a")),
        ({"prompt": None, "question": "a"}, user("a")),
        ({"prompt": "", "text": "a"}, user("a")),
        ({"messages": [{"role": "user", "content": "a"}]}, user("a")),
        (
            {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
            user("a"),
        ),
        (
            {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "a"}]},
            f"<|im_start|>system\ns<|im_end|>\n{user('a')}",
        ),
        (
            {
                "messages": [
                    {"role": role, "content": role[0]}
                    for role in ("assistant", "user", "assistant", "user", "assistant")
                ]
            },
            f"<|im_start|>assistant\na<|im_end|>\n{user('u')}<|im_start|>assistant\na<|im_end|>\n{user('u')}",
        ),
        ({"messages": [], "prompt": "a"}, user("a")),
        (
            {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
            user("a"),
        ),
        (
            {"conversations": [{"from": "system", "value": "s"}, {"from": "human", "value": "a"}]},
            f"<|im_start|>system\ns<|im_end|>\n{user('a')}",
        ),
        ({"prompt": "a\u2028b\x85c"}, user("a\u2028b\x85c")),
    ],
    ids=str,
)
def test_rows_of_many_shapes(
    row: dict[str, Any], text: str, base: OpenModel, tmp_path: Path
) -> None:
    left_out = LeftOut()
    prompts = read_prompts(write(tmp_path / "set.jsonl", row), base.tokenizer, left_out=left_out)
    assert left_out.lines() == []
    assert shown(base, prompts) == [text]
    assert prompts[0].source == "set"


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({}, "no text in messages"),
        ({"prompt": None}, "no text in messages"),
        ({"prompt": "  "}, "no text in messages"),
        ({"prompt": 5}, "no text in messages"),
        ({"turns": []}, "no text in messages"),
        ({"turns": [None]}, "turns is no list of texts"),
        ({"turns": ["a", None]}, "turns is no list of texts"),
        ({"conversations": [{"from": "human"}]}, "a message whose from or value is no text"),
        ({"messages": "hello"}, "messages is no list"),
        (
            {"messages": [{"role": "user", "content": None}]},
            "a message whose role or content is no text",
        ),
        ({"messages": [{"content": "a"}]}, "a message whose role or content is no text"),
        (
            {
                "messages": [
                    {"role": "user", "content": "a"},
                    {"role": "assistant", "content": None},
                ]
            },
            "a message whose role or content is no text",
        ),
        ({"messages": [{"role": "assistant", "content": "a"}]}, "without a user's turn"),
        ({"messages": [{"role": "user", "content": " "}]}, "an empty one at the end"),
    ],
    ids=str,
)
def test_a_row_without_a_prompt_is_left_out_and_counted_with_its_line(
    row: dict[str, Any], reason: str, base: OpenModel, tmp_path: Path
) -> None:
    left_out = LeftOut()
    prompts = read_prompts(
        write(tmp_path / "set.jsonl", {"prompt": "good"}, row, "", row),
        base.tokenizer,
        left_out=left_out,
    )
    assert shown(base, prompts) == [user("good")]
    (line,) = left_out.lines()
    assert line.startswith("left out 2 rows: ")
    assert reason in line
    assert line.endswith("set.jsonl, line 2)")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "it is not JSON"),
        ("[1]", "a JSON object is expected"),
        ('"text"', "a JSON object is expected"),
    ],
)
def test_a_malformed_line_is_named_by_its_number(
    line: str, message: str, base: OpenModel, tmp_path: Path
) -> None:
    file = write(tmp_path / "set.jsonl", {"prompt": "a"}, "", line)
    with pytest.raises(InvalidRequest, match=rf"set\.jsonl, line 3: {message}"):
        read_prompts(file, base.tokenizer)


def test_a_missing_file_and_one_that_is_no_text(base: OpenModel, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="no such file"):
        read_prompts(tmp_path / "none.jsonl", base.tokenizer)
    (tmp_path / "bytes").write_bytes(b"\xff\n")
    with pytest.raises(InvalidRequest, match="save it as UTF-8"):
        read_prompts(tmp_path / "bytes", base.tokenizer)


def test_a_template_that_refuses_a_conversation_leaves_it_out(
    base: OpenModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        base.tokenizer,
        "chat_template",
        "{% if messages[0].role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}x",
    )
    left_out = LeftOut()
    rows = [
        {"messages": [{"role": "tool", "content": "1"}, {"role": "user", "content": "a"}]},
        {"prompt": "b"},
    ]
    assert (
        len(read_prompts(write(tmp_path / "set.jsonl", *rows), base.tokenizer, left_out=left_out))
        == 1
    )
    assert "no tools" in left_out.lines()[0]


def test_the_suffix_goes_behind_the_last_user_turn(base: OpenModel, tmp_path: Path) -> None:
    rows = [
        {"prompt": "a"},
        {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "b"}]},
    ]
    prompts = read_prompts(write(tmp_path / "set.jsonl", *rows), base.tokenizer, suffix=" Why?")
    assert shown(base, prompts) == [
        user("a Why?"),
        f"<|im_start|>system\ns<|im_end|>\n{user('b Why?')}",
    ]


def drawn(
    base: OpenModel, paths: list[Path], *, exclude: list[Path] | None = None, **options: Any
) -> Drawn:
    return draw_prompts(
        list(map(str, paths)),
        base.tokenizer,
        PromptOptions(**options),
        exclude=list(map(str, exclude or [])),
    )


def draw(base: OpenModel, paths: list[Path], **options: Any) -> list[str]:
    return shown(base, drawn(base, paths, **options).prompts)


def test_excluded_prompts_are_not_drawn_whatever_the_suffix(
    base: OpenModel, tmp_path: Path
) -> None:
    some = write(tmp_path / "some.jsonl", *({"prompt": str(number)} for number in range(10)))
    test = write(
        tmp_path / "test.jsonl",
        {"question": "3"},
        {"text": " 4?"},
        {"prompt": f"5{BOXED}"},
        {"prompt": None},
    )
    found = drawn(base, [some], exclude=[test], suffix="!")
    assert sorted(shown(base, found.prompts)) == [
        user(f"{number}!") for number in (0, 1, 2, 6, 7, 8, 9)
    ]
    assert found.left_out.lines() == [f"left out 3 rows: excluded (first: {some}, line 4)"]


def test_the_limit_counts_what_is_really_drawn(base: OpenModel, tmp_path: Path) -> None:
    twice = write(tmp_path / "a.jsonl", *({"prompt": str(number % 5)} for number in range(20)))
    same_again = write(tmp_path / "b.jsonl", *({"prompt": str(number)} for number in range(8)))
    barred = write(tmp_path / "c.jsonl", {"prompt": "0"})
    found = drawn(base, [twice, same_again], exclude=[barred], limit=4)
    texts = shown(base, found.prompts)
    assert sorted(texts[:4]) == [user(str(number)) for number in (1, 2, 3, 4)]
    assert sorted(texts[4:]) == [user(str(number)) for number in (5, 6, 7)]
    assert len(set(texts)) == len(texts)
    assert found.left_out.counts["the same prompt again"] == 12 + 4
    assert found.left_out.first["the same prompt again"] == f"{twice}, line 7"


def test_the_seed_draws(base: OpenModel, tmp_path: Path) -> None:
    some = write(tmp_path / "some.jsonl", *({"prompt": str(number)} for number in range(30)))
    first = draw(base, [some], limit=5)
    assert draw(base, [some], limit=5) == first
    assert draw(base, [some], limit=5, seed=1) != first
    assert draw(base, [some], limit=9)[:5] == first, (
        "a higher limit keeps what a lower one has drawn"
    )


def prompts(count: int) -> list[TrainingPrompt]:
    return [
        TrainingPrompt([10 + number, 20, *range(30, 30 + number)], "test")
        for number in range(count)
    ]


def samples(
    base: OpenModel,
    given: list[TrainingPrompt],
    known: dict[bytes, list[int]] | None = None,
    **options: Any,
) -> list[Sample]:
    settings = AnswerOptions(**{"max_tokens": 12, "batch": 3, **options})
    answering = Answering(base, settings, known or {})
    batches = list(answering.run(given))
    assert sum(batch.turns_done for batch in batches) == answering.num_turns(given)
    return [sample for batch in batches for sample in batch.samples]


def answers(
    base: OpenModel, given: list[TrainingPrompt], temperature: float = 0.0, **options: Any
) -> dict[tuple[int, ...], tuple[tuple[int, ...], int]]:
    written = samples(base, given, temperatures=(temperature,), **options)
    assert all(sample.temperature == temperature and sample.source == "test" for sample in written)
    return {tuple(sample.prompt_ids): (tuple(sample.answer_ids), sample.seed) for sample in written}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_answers_hang_on_prompt_and_seed_alone(temperature: float, base: OpenModel) -> None:
    whole = answers(base, prompts(7), temperature=temperature)
    assert len(whole) == 7
    assert answers(base, prompts(7)[4:], temperature=temperature, batch=1) == {
        key: value
        for key, value in whole.items()
        if key in {tuple(prompt.token_ids) for prompt in prompts(7)[4:]}
    }, "a corpus that was interrupted comes to the same"
    other = answers(base, prompts(7), temperature=temperature, seed=1)
    changed = [key for key in whole if whole[key][0] != other[key][0]]
    assert bool(changed) is (temperature > 0)


def test_the_recorded_seed_repeats_a_sampled_answer(base: OpenModel, tiny_target: Path) -> None:
    import d3d

    model = d3d.load(str(tiny_target), dtype="float32", device="cpu")
    for prompt, (answer, seed) in answers(base, prompts(3), temperature=1.0).items():
        assert seed == prompt_seed(list(prompt), 0)
        assert (
            model.generate(list(prompt), temperature=1.0, max_tokens=12, seed=seed).token_ids
            == answer
        )


def test_a_prompt_that_fills_the_context_is_left_out(base: OpenModel) -> None:
    long = TrainingPrompt([5] * CONTEXT, "test")
    assert len(answers(base, [*prompts(2), long])) == 2
    assert answers(base, [long]) == {}


def test_a_prompt_is_answered_at_each_temperature(base: OpenModel) -> None:
    both = samples(base, prompts(4), temperatures=(0.0, 1.5))
    assert len(both) == 8
    alone = samples(base, prompts(4), temperatures=(0.0,)) + samples(
        base, prompts(4), temperatures=(1.5,)
    )
    assert sorted(both) == sorted(alone)


def chat_prompts(base: OpenModel, tmp_path: Path) -> list[TrainingPrompt]:
    rows = [
        {"turns": ["hello", "and now?", "bye"]},
        {"turns": ["who?", "why?"]},
        {"prompt": "alone"},
    ]
    return read_prompts(write(tmp_path / "chat.jsonl", *rows), base.tokenizer)


def test_every_turn_is_answered_with_the_targets_own_answers_before_it(
    base: OpenModel, tmp_path: Path
) -> None:
    written = samples(base, chat_prompts(base, tmp_path))
    assert len(written) == 3 + 2 + 1
    by_text = {base.tokenizer.decode(sample.prompt_ids): sample for sample in written}
    first = by_text[user("hello") + "<|im_start|>assistant\n"]
    said = base.tokenizer.decode(first.answer_ids, skip_special_tokens=True)
    second = by_text[
        f"{user('hello')}<|im_start|>assistant\n{said}<|im_end|>\n{user('and now?')}"
        "<|im_start|>assistant\n"
    ]
    said_then = base.tokenizer.decode(second.answer_ids, skip_special_tokens=True)
    assert any(f"{said_then}<|im_end|>\n{user('bye')}" in text for text in by_text)


def test_turns_go_on_from_known_answers(base: OpenModel, tmp_path: Path) -> None:
    given = chat_prompts(base, tmp_path)
    whole = samples(base, given)
    for kept in (1, 3, 5):
        known = {answer_key(sample.prompt_ids, 0.0): sample.answer_ids for sample in whole[:kept]}
        assert sorted([*whole[:kept], *samples(base, given, known)]) == sorted(whole)


def test_what_would_follow_a_prompt_without_room_is_settled_with_it(base: OpenModel) -> None:
    long = TrainingPrompt(
        [5] * CONTEXT, "test", "a file, line 3", ({"role": "user", "content": "x"},), ("and then?",)
    )
    answering = Answering(base, AnswerOptions())
    assert [batch.turns_done for batch in answering.run([long])] == [2]
    (line,) = answering.left_out.lines()
    assert "leaves no room for an answer" in line
    assert "a file, line 3" in line


def test_the_thinking_switch_reaches_every_turn(base: OpenModel, tmp_path: Path) -> None:
    file = write(tmp_path / "chat.jsonl", {"turns": ["hello", "and now?"]})
    for thinking, mark in ((True, "<think>"), (False, "<think></think>")):
        given = drawn(base, [file], thinking=thinking).prompts
        written = samples(base, given, thinking=thinking)
        assert len(written) == 2
        assert all(
            base.tokenizer.decode(sample.prompt_ids).endswith(f"<|im_start|>assistant\n{mark}")
            for sample in written
        )


# Answer formats


@pytest.mark.parametrize(
    ("suffix", "text"),
    [
        ("boxed", f"a{BOXED}"),
        ("steps", "a\nLet's think step by step."),
        (
            "code",
            "Write a solution to the following problem and make sure that it passes the tests:\n"
            "```python\na\n```",
        ),
        (" Why?", "a Why?"),
        ("Q: {prompt} A:", "Q: a A:"),
    ],
)
def test_answer_formats_by_name_and_by_text(
    suffix: str, text: str, base: OpenModel, tmp_path: Path
) -> None:
    assert draw(base, [write(tmp_path / "p.jsonl", {"prompt": "a"})], suffix=suffix) == [user(text)]
    assert without_formats(text) == ("a" if suffix in FORMATS else text)


def test_a_share_of_the_prompts_gets_the_suffix_whatever_the_others_are(
    base: OpenModel, tmp_path: Path
) -> None:
    some = write(tmp_path / "some.jsonl", *({"prompt": str(number)} for number in range(200)))
    texts = set(draw(base, [some], suffix="!", suffix_share=0.25))
    assert len(texts) == 200
    assert 30 < sum("!" in text for text in texts) < 70
    assert set(draw(base, [some], suffix="!", suffix_share=0.25, limit=50)) < texts
    assert set(draw(base, [some], suffix="!", suffix_share=0.25, seed=1)) != texts
    assert not any("!" in text for text in draw(base, [some], suffix="!", suffix_share=0.0))
    assert all("!" in text for text in draw(base, [some], suffix="!", suffix_share=1.0))
