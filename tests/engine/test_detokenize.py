"""Streamed text only grows, shows whole characters, and adds up to the decoded whole."""

from __future__ import annotations

import random
from itertools import accumulate
from typing import Any, ClassVar

import pytest
from transformers import PreTrainedTokenizerFast

from d3d.text.answers import Detokenizer, StopStringFilter


def decode(tokenizer: PreTrainedTokenizerFast, ids: list[int]) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))


def stream(tokenizer: Any, ids: list[int]) -> list[str]:
    detokenizer = Detokenizer(tokenizer)
    return [*(detokenizer.push(token_id) for token_id in ids), detokenizer.finish()]


def byte_ids(tokenizer: PreTrainedTokenizerFast, data: bytes) -> list[int]:
    """One token per byte, whatever the byte-level tokenizer would merge."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in visible]
    letters = {byte: chr(byte) for byte in visible} | {
        byte: chr(256 + index) for index, byte in enumerate(hidden)
    }
    return [tokenizer.convert_tokens_to_ids(letters[byte]) for byte in data]


TEXTS = [
    "hello world",
    " ha  ha\n\nha ",
    "你好 世界。🙂👩‍👩‍👧 ok",
    "naïve café\t…",
    "🙂" * 40,
    "",
    "\ufffd really \ufffd\ufffd",
]


@pytest.mark.parametrize("text", TEXTS)
def test_pieces_join_to_the_text(byte_tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    ids = byte_tokenizer.encode(text)
    assert "".join(stream(byte_tokenizer, ids)) == text == decode(byte_tokenizer, ids)


@pytest.mark.parametrize("text", [text for text in TEXTS if "\ufffd" not in text])
def test_no_piece_of_byte_tokens_holds_half_a_character(
    byte_tokenizer: PreTrainedTokenizerFast, text: str
) -> None:
    pieces = stream(byte_tokenizer, byte_ids(byte_tokenizer, text.encode()))
    assert not any("\ufffd" in piece for piece in pieces)
    assert "".join(pieces) == text


def test_a_character_appears_with_its_last_byte(byte_tokenizer: PreTrainedTokenizerFast) -> None:
    assert stream(byte_tokenizer, byte_ids(byte_tokenizer, "a🙂b".encode())) == [
        "a",
        "",
        "",
        "",
        "🙂",
        "b",
        "",
    ]


def test_text_before_a_half_character_is_not_kept_waiting(
    byte_tokenizer: PreTrainedTokenizerFast,
) -> None:
    ids = byte_ids(byte_tokenizer, b"x" + "好".encode()[:1])
    assert stream(byte_tokenizer, ids) == ["x", "", "\ufffd"]


def test_random_ids_join_to_the_decoded_whole(byte_tokenizer: PreTrainedTokenizerFast) -> None:
    """Mostly invalid UTF-8, special tokens in between."""
    rng = random.Random(0)
    for _ in range(300):
        high = byte_ids(byte_tokenizer, bytes(rng.randrange(128, 256) for _ in range(8)))
        pool = high if rng.random() < 0.5 else range(len(byte_tokenizer))
        ids = [rng.choice(pool) if rng.random() < 0.9 else 0 for _ in range(rng.randrange(1, 150))]
        assert "".join(stream(byte_tokenizer, ids)) == decode(byte_tokenizer, ids)


def test_every_prefix_shows_a_prefix_of_its_own_decoding(
    byte_tokenizer: PreTrainedTokenizerFast,
) -> None:
    rng = random.Random(1)
    ids = [rng.randrange(len(byte_tokenizer)) for _ in range(200)]
    for length, shown in enumerate(accumulate(stream(byte_tokenizer, ids)[:-1]), start=1):
        assert decode(byte_tokenizer, ids[:length]).startswith(shown)


@pytest.mark.parametrize("data", [b"\xff", b"\xe4", b"\x80", b"\xf0\x9f"])
def test_invalid_bytes_wait_for_a_handful_of_tokens_at_most(
    byte_tokenizer: PreTrainedTokenizerFast, data: bytes
) -> None:
    ids = byte_ids(byte_tokenizer, data * 60)
    for length, shown in enumerate(accumulate(stream(byte_tokenizer, ids)[:-1]), start=1):
        assert len(decode(byte_tokenizer, ids[:length])) - len(shown) <= 5


class BytesTokenizer:
    """Decodes ids as pieces of UTF-8, and counts the ids."""

    added_tokens_decoder: ClassVar[dict[int, object]] = {}

    def __init__(self, *pieces: bytes) -> None:
        self.pieces = pieces
        self.num_decoded = 0

    def decode(self, ids: list[int], **_: bool) -> str:
        self.num_decoded += len(ids)
        return b"".join(self.pieces[token_id] for token_id in ids).decode(errors="replace")


@pytest.mark.parametrize(
    "pieces",
    [
        (b"word ",),
        (b"\xff",),
        ("好".encode()[:1],),
        tuple(bytes([byte]) for byte in "🙂".encode()),
        (
            "好".encode()[2:] + "世".encode()[:2],
            "世".encode()[2:] + "好".encode()[:2],
        ),  # every token ends inside a character
    ],
)
def test_the_cost_of_a_token_does_not_grow(pieces: tuple[bytes, ...]) -> None:
    tokenizer = BytesTokenizer(*pieces)
    ids = list(range(len(pieces))) * (2000 // len(pieces))
    text = "".join(stream(tokenizer, ids))
    assert tokenizer.num_decoded < 60 * len(ids)
    assert text == tokenizer.decode(ids)


def test_special_tokens_leave_no_text(byte_tokenizer: PreTrainedTokenizerFast) -> None:
    smile = byte_ids(byte_tokenizer, "🙂".encode())
    assert stream(byte_tokenizer, [0, *smile[:2], 0, 1, *[0] * 30, *smile[2:], 0]) == [
        *[""] * 36,
        "🙂",
        "",
        "",
    ]


def test_spaces_of_sentencepiece_stay_except_the_first(
    fallback_tokenizer: PreTrainedTokenizerFast,
) -> None:
    ids = fallback_tokenizer.convert_tokens_to_ids(
        ["<s>", "▁the", "▁cat", "a", "▁", "▁", "▁b", "."] + ["▁a", "▁cat"] * 40 + ["</s>"]
    )
    pieces = stream(fallback_tokenizer, ids)
    assert pieces[:8] == ["", "the", " cat", "a", " ", " ", " b", "."]
    assert "".join(pieces) == decode(fallback_tokenizer, ids)


def test_characters_of_byte_fallback_tokens_appear_one_by_one(
    fallback_tokenizer: PreTrainedTokenizerFast,
) -> None:
    data = "你好🙂" * 30
    ids = fallback_tokenizer.convert_tokens_to_ids(
        ["▁the", *(f"<0x{byte:02X}>" for byte in data.encode()), "▁cat"]
    )
    pieces = stream(fallback_tokenizer, ids)
    assert "".join(pieces) == decode(fallback_tokenizer, ids) == f"the{data} cat"
    assert [piece for piece in pieces if piece] == ["the", *data, " cat"]


def test_a_wrong_byte_does_not_repeat_what_was_shown(
    fallback_tokenizer: PreTrainedTokenizerFast,
) -> None:
    ids = fallback_tokenizer.convert_tokens_to_ids(
        ["▁the", *(f"<0x{byte:02X}>" for byte in "你".encode()), "<0xFF>", "a", "▁b"]
    )
    assert "".join(stream(fallback_tokenizer, ids)) == "the你\ufffda b"


def feed(stop: tuple[str, ...], pieces: list[str]) -> tuple[list[str], bool]:
    held = StopStringFilter(stop)
    shown = []
    for piece in pieces:
        shown.append(held.push(piece))
        if held.stopped:
            return shown, True
    return [*shown, held.finish()], False


def test_the_beginning_of_a_stop_string_is_held_back_until_it_is_decided() -> None:
    assert feed(("END",), ["go E", "N", "x", " E"]) == (["go ", "", "ENx", " ", "E"], False)
    assert feed(("END",), ["go E", "N", "D and on"]) == (["go ", "", ""], True)


def test_overlapping_beginnings_are_found() -> None:
    assert feed(("aab",), list("aaab")) == (["", "", "a", ""], True)


def test_the_stop_string_that_is_complete_first_wins_however_text_is_cut() -> None:
    text, stop = "xabcabcz", ("abca", "bc", "z")
    for size in range(1, len(text) + 1):
        shown, stopped = feed(stop, [text[i : i + size] for i in range(0, len(text), size)])
        assert ("".join(shown), stopped) == ("xa", True)


def test_a_stop_string_that_came_too_early_does_not_count_later() -> None:
    held = StopStringFilter(("b", "abc"))
    assert held.push("xab", honour=False) == "x"
    assert held.push("y") == "aby"
    assert not held.stopped
    assert held.push("ab", honour=False) + held.push("c!") == ""
    assert held.stopped
