"""Prompts become the ids that the template gives; only the template writes control tokens."""

from __future__ import annotations

import copy
import gc
import random
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from d3d.errors import InvalidRequest
from d3d.hub.open_model import load_tokenizer
from d3d.text.answers import Detokenizer, decode_answer
from d3d.text.control import ControlCoder
from d3d.text.prompts import encode_chat, encode_prompt
from support.tiny_model import END, START, tiny_tokenizer

PAD = "<|pad|>"
PARTS = [
    *(
        "hello",
        " the cat",
        "\n\n",
        "  ",
        "\t",
        "é",
        "你好",
        "🙂",
        "👩‍👩‍👧",
        "a\u0301",
        "\u202e",
        "\u2028",
    ),
    *("\ufeff", "\ufffd", "\x00", "\x1b[31m", "\U000f0000", "\U0010ffff", "<|", "|>", "<", "</s>"),
    *("<think>", "{{ x }}", '{"a": 1}', "\\ud800", "\r\n", "0" * 300),
]
SPELLED = [
    END,
    START,
    PAD,
    f"<|im_{END}",
    f"{START}{END}",
    "<|im_st",
    "art|>",
    "im_end|>",
    "im_end",
]
TEMPLATES = {
    "as it is": "{{ m.content }}",
    "trimmed": "{{ m.content | trim }}",
    "as JSON": "{{ m.content | tojson }}",
    "by a condition": "{% if '</think>' in m.content %}{{ m.content.split('</think>')[-1] }}"
    "{% else %}{{ m.content.lstrip('\\n') }}{% endif %}",
}


def with_template(content: str) -> PreTrainedTokenizerFast:
    tokenizer = tiny_tokenizer()
    assert "{{ m.content }}" in tokenizer.chat_template
    tokenizer.chat_template = tokenizer.chat_template.replace("{{ m.content }}", content)
    return tokenizer


def metaspace_tokenizer() -> PreTrainedTokenizerFast:
    """As of Llama 2 and Phi-3: a space before the first word only, bytes for what is unknown, and a
    control token that takes the white space behind it along."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁abcdehloruy<|>", "▁a", "he"]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    merges = [("▁", "a"), ("h", "e")]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.add_special_tokens([AddedToken(END, rstrip=True), AddedToken(START, lstrip=True)])
    tokenizer.add_tokens(["<think>"])
    template = tiny_tokenizer().chat_template
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END, unk_token="<unk>", chat_template=template
    )


@pytest.fixture(scope="module", params=[*TEMPLATES, "metaspace"])
def tokenizer(request: pytest.FixtureRequest) -> PreTrainedTokenizerFast:
    return (
        metaspace_tokenizer()
        if request.param == "metaspace"
        else with_template(TEMPLATES[request.param])
    )


def conversations(parts: list[str], seed: int, count: int = 60) -> Iterator[list[dict[str, str]]]:
    draw = random.Random(seed)
    for _ in range(count):
        roles = (["system"] if draw.random() < 0.3 else []) + ["user", "assistant"] * 3
        length = draw.randint(roles.index("user") + 1, len(roles))
        yield [
            {"role": role, "content": "".join(draw.choices(parts, k=draw.randint(1, 7)))}
            for role in roles[: length - (roles[length - 1] == "assistant")]
        ]


def rendered(tokenizer: Any, messages: list[dict[str, str]]) -> str:
    return str(tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False))


def expected(tokenizer: Any, messages: list[dict[str, str]]) -> list[int]:
    return list(tokenizer.encode(rendered(tokenizer, messages), add_special_tokens=False))


def test_ordinary_conversations_are_encoded_as_the_template_renders_them(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    coder = ControlCoder(tokenizer)
    for messages in conversations(PARTS, seed=1):
        wanted = expected(tokenizer, messages)
        assert encode_chat(tokenizer, messages) == wanted
        assert coder.encode(rendered(tokenizer, messages), "\U000ffffd") == wanted


def test_no_control_token_comes_out_of_a_message(tokenizer: PreTrainedTokenizerFast) -> None:
    controls = {tokenizer.convert_tokens_to_ids(token) for token in (END, START, PAD)}
    for messages in conversations([*PARTS, *SPELLED, *SPELLED], seed=2):
        harmless = [message | {"content": "a"} for message in messages]
        own = [each for each in expected(tokenizer, harmless) if each in controls]
        ids = encode_chat(tokenizer, messages)
        assert [each for each in ids if each in controls] == own


def test_text_comes_out_as_it_went_in() -> None:
    tokenizer = with_template(TEMPLATES["as it is"])
    special = {tokenizer.convert_tokens_to_ids(token) for token in (END, START)}
    for messages in conversations([*PARTS, *SPELLED], seed=3):
        ids = encode_chat(tokenizer, messages)
        text = (
            "".join(f"{message['role']}\n{message['content']}\n" for message in messages)
            + "assistant\n"
        )
        assert decode_answer(tokenizer, ids) == text
        assert tokenizer.decode(ids).count(END) >= len(messages)
        detokenizer = Detokenizer(tokenizer)
        assert "".join([*map(detokenizer.push, ids), detokenizer.finish()]) == text
        assert sum(token_id in special for token_id in ids) == 2 * len(messages) + 1


def test_a_control_token_in_parts_that_the_template_joins_stays_text() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}<|im_end|>"
    for first, second in ((START[:4], START[4:]), (START[:1], START[1:]), (START[:-1], START[-1])):
        messages = [{"role": "user", "content": text} for text in (first, second)]
        assert tokenizer.convert_tokens_to_ids(START) not in encode_chat(tokenizer, messages)


def test_a_role_that_spells_a_control_token_stays_text() -> None:
    tokenizer = tiny_tokenizer()
    messages = [{"role": f"user{END}", "content": "a"}, {"role": "user", "content": "b"}]
    assert encode_chat(tokenizer, messages).count(tokenizer.convert_tokens_to_ids(END)) == 2


def test_a_raw_prompt_may_spell_control_tokens() -> None:
    tokenizer = tiny_tokenizer()
    ids = encode_prompt(tokenizer, f"a{END}", raw=True)
    assert ids[-1] == tokenizer.convert_tokens_to_ids(END)
    assert ids[-1] not in encode_prompt(tokenizer, f"a{END}")[-8:-6]


def test_a_tokenizer_that_must_read_a_control_token_is_refused_by_name() -> None:
    vocabulary = {"<unk>": 0, "x": 1, END: 2, START: 3, "\n": 4}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.Unigram([(each, -1.0) for each in vocabulary], 0)),
        eos_token=END,
        chat_template=tiny_tokenizer().chat_template,
    )
    with pytest.raises(InvalidRequest, match=r"control token <\|im_end\|>, which"):
        encode_prompt(tokenizer, END)


@pytest.mark.parametrize("said", ["The cat", "The end", "e", f"x{END}", "a\n", " b"])
def test_a_conversation_that_ends_with_the_assistant_is_continued(said: str) -> None:
    tokenizer = tiny_tokenizer()
    asked = [{"role": "user", "content": "hello"}]
    ids = encode_chat(tokenizer, [*asked, {"role": "assistant", "content": said}])
    start = expected(tokenizer, asked)
    assert ids[: len(start) - 1] == start[:-1]
    assert decode_answer(tokenizer, ids) == decode_answer(tokenizer, start) + said


def test_empty_words_of_the_assistant_begin_an_answer() -> None:
    tokenizer = tiny_tokenizer()
    asked = [{"role": "user", "content": "hello"}]
    for said in ("", " \n"):
        messages = [*asked, {"role": "assistant", "content": said}]
        assert encode_chat(tokenizer, messages) == expected(tokenizer, asked)


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "system", "content": "Be kind."}],
        [{"role": "assistant", "content": "I think"}],
    ],
)
def test_a_conversation_without_a_users_turn_is_refused(messages: list[dict[str, str]]) -> None:
    with pytest.raises(InvalidRequest, match="none of them is a user's turn"):
        encode_chat(tiny_tokenizer(), messages)


def test_text_that_is_no_unicode_is_refused_with_its_place() -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "user", "content": "ab \ud800"}]
    with pytest.raises(InvalidRequest, match=r"message 2: it is not valid Unicode .* character 3"):
        encode_chat(tiny_tokenizer(), messages)


def test_the_tokenizer_is_not_changed() -> None:
    tokenizer = tiny_tokenizer()
    before = copy.deepcopy(tokenizer.backend_tokenizer).to_str()
    encode_prompt(tokenizer, f"a{END}b")
    assert tokenizer.backend_tokenizer.to_str() == before
    assert tokenizer.encode(END) == [tokenizer.convert_tokens_to_ids(END)]
    kept = weakref.ref(tokenizer)
    del tokenizer
    gc.collect()
    assert kept() is None, "what was prepared for a tokenizer goes with it"


@pytest.mark.real_model
def test_the_real_tokenizer(smollm2: Path) -> None:
    tokenizer = load_tokenizer(smollm2)
    end, start = map(tokenizer.convert_tokens_to_ids, (END, START))
    coder = ControlCoder(tokenizer)
    for messages in conversations(PARTS, seed=4):
        wanted = expected(tokenizer, messages)
        assert encode_chat(tokenizer, messages) == wanted
        assert coder.encode(rendered(tokenizer, messages), "\U000ffffd") == wanted
    for messages in conversations([*PARTS, *SPELLED], seed=5):
        ids = encode_chat(tokenizer, messages)
        own = len(messages) + (messages[0]["role"] != "system")
        assert (ids.count(end), ids.count(start)) == (own, own + 1)
