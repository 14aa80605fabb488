"""A block ends as plain decoding would: at any position, in ids, log-probabilities and text."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from d3d.engine.request import Request
from d3d.engine.round import TokenLogprob
from d3d.engine.sampling import LogitRows, SamplingParams, Verdict, sample_match
from d3d.engine.text import StopScanner
from d3d.errors import InvalidRequest
from support.drafters import grow

EOS = 0
BLOCKS = (1, 2, 3, 4, 5, 8, 17)


def scanner(
    params: SamplingParams,
    tokenizer: PreTrainedTokenizerFast | None = None,
    *,
    eos: frozenset[int] = frozenset({EOS}),
    prompt_length: int = 5,
    max_length: int = 1000,
) -> StopScanner:
    return StopScanner(
        params,
        prompt_length=prompt_length,
        max_length=max_length,
        eos_token_ids=eos,
        tokenizer=tokenizer,
    )


def verdicts(ids: list[int], size: int) -> Iterator[Verdict]:
    """The ids as rounds of `size` tokens, the last of each the bonus token."""
    for start in range(0, len(ids), size):
        *accepted, bonus = ids[start : start + size]
        logprobs = tuple(TokenLogprob(token_id, -1.0, ()) for token_id in (*accepted, bonus))
        yield Verdict(tuple(accepted), bonus, logprobs)


def run(scan: StopScanner, ids: list[int], size: int) -> tuple[list[int], str | None, str]:
    committed: list[int] = []
    text = ""
    for verdict in verdicts(ids, size):
        result = scan.scan(verdict)
        cut = result.verdict
        assert tuple(entry.token_id for entry in cut.logprobs) == cut.token_ids
        assert cut.accepted == verdict.accepted[: cut.num_accepted]
        assert (cut.bonus_token is None) == (
            len(cut.token_ids) < len(verdict.token_ids)
            or cut.num_accepted == len(verdict.token_ids)
        )
        committed += cut.token_ids
        text += result.text
        if result.finish_reason is not None:
            return committed, result.finish_reason, text
    return committed, None, text


@pytest.mark.parametrize("size", BLOCKS)
@pytest.mark.parametrize("at", range(18))
def test_eos_ends_the_answer_at_every_position(at: int, size: int) -> None:
    ids = [7] * 18
    ids[at] = EOS
    assert run(scanner(SamplingParams()), ids, size) == (ids[: at + 1], "stop", "")


def test_an_accepted_eos_leaves_no_bonus_token() -> None:
    logprobs = tuple(TokenLogprob(token_id, -1.0, ()) for token_id in (7, EOS, 9))
    result = scanner(SamplingParams()).scan(Verdict((7, EOS), 9, logprobs))
    assert result.verdict == Verdict((7, EOS), None, logprobs[:2])


def test_an_eos_as_bonus_token_leaves_the_verdict_whole() -> None:
    verdict = Verdict((7, 8), EOS)
    assert scanner(SamplingParams()).scan(verdict).verdict is verdict


def test_an_eos_that_only_the_drafter_wants_ends_nothing() -> None:
    params = SamplingParams(max_tokens=6)
    request, scan = Request([1], params, eos_token_ids=frozenset({EOS})), scanner(params)
    logits = torch.zeros(3, 10)
    logits[:, 4] = 1.0
    reason = None
    while reason is None:
        verdict, reason, _ = scan.scan(sample_match(LogitRows(logits), [EOS, EOS], request))
        grow(request, verdict.token_ids)
    assert (request.answer_ids, reason) == ([4] * 6, "length")


@pytest.mark.parametrize("size", BLOCKS)
def test_ignored_eos_goes_on_but_stop_token_ids_still_end(size: int) -> None:
    params = SamplingParams(ignore_eos=True, stop_token_ids=(9,))
    assert run(scanner(params), [7, EOS, 8, 9, 7], size) == ([7, EOS, 8, 9], "stop", "")


@pytest.mark.parametrize("size", BLOCKS)
def test_a_model_without_eos_runs_to_max_tokens(size: int) -> None:
    assert run(scanner(SamplingParams(max_tokens=6), eos=frozenset()), [0, 1, 2] * 5, size) == (
        [0, 1, 2, 0, 1, 2],
        "length",
        "",
    )


@pytest.mark.parametrize("size", BLOCKS)
@pytest.mark.parametrize("max_tokens", range(1, 19))
def test_never_more_than_max_tokens(max_tokens: int, size: int) -> None:
    ids = list(range(1, 40))
    assert run(scanner(SamplingParams(max_tokens=max_tokens)), ids, size) == (
        ids[:max_tokens],
        "length",
        "",
    )


@pytest.mark.parametrize("size", BLOCKS)
@pytest.mark.parametrize("prompt_length", [1, 28, 31])
def test_prompt_and_answer_never_pass_the_context(prompt_length: int, size: int) -> None:
    committed, reason, _ = run(
        scanner(SamplingParams(), prompt_length=prompt_length, max_length=32), [7] * 50, size
    )
    assert (prompt_length + len(committed), reason) == (32, "length")


def test_remaining_counts_down() -> None:
    scan = scanner(SamplingParams(max_tokens=9), prompt_length=5, max_length=12)
    assert scan.limit == scan.remaining == 7
    scan.scan(Verdict((1, 2), 3))
    assert scan.remaining == 4


@pytest.mark.parametrize("size", BLOCKS)
def test_eos_at_the_last_allowed_token_is_a_stop(size: int) -> None:
    assert run(scanner(SamplingParams(max_tokens=3)), [7, 8, EOS, 9], size) == (
        [7, 8, EOS],
        "stop",
        "",
    )


def test_a_full_context_is_refused() -> None:
    with pytest.raises(InvalidRequest, match=r"prompt: 32 tokens leave no room .* 32"):
        scanner(SamplingParams(), prompt_length=32, max_length=32)


def test_stop_strings_without_a_tokenizer_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="stop_token_ids"):
        scanner(SamplingParams(stop=("x",)))


def first_stop_by_brute_force(
    tokenizer: PreTrainedTokenizerFast, ids: list[int], stop: str, min_tokens: int
) -> tuple[list[int], str]:
    for length in range(1, len(ids) + 1):
        text = tokenizer.decode(ids[:length])
        before = tokenizer.decode(ids[: length - 1]) if length > 1 else ""
        if length >= min_tokens and text.count(stop) > before.count(stop):
            return ids[:length], text[: text.rindex(stop)]
    return ids, tokenizer.decode(ids)


@pytest.mark.parametrize("size", BLOCKS)
@pytest.mark.parametrize("min_tokens", [0, 3, 9])
@pytest.mark.parametrize("stop", [" ha ha ha", "o w", "好", "ld!", "🙂 b", "ello"])
def test_stop_strings_end_ids_and_text_at_one_place(
    byte_tokenizer: PreTrainedTokenizerFast, stop: str, min_tokens: int, size: int
) -> None:
    ids = byte_tokenizer.encode("hello world! ha ha ha 你好🙂 bye hello world! ha ha ha 你好🙂 bye")
    params = SamplingParams(stop=(stop,), min_tokens=min_tokens)
    expected_ids, expected_text = first_stop_by_brute_force(byte_tokenizer, ids, stop, min_tokens)
    assert len(expected_ids) < len(ids)
    assert run(scanner(params, byte_tokenizer), ids, size) == (expected_ids, "stop", expected_text)


@pytest.mark.parametrize("size", BLOCKS)
def test_text_that_might_have_become_a_stop_string_is_given_at_the_end(
    byte_tokenizer: PreTrainedTokenizerFast, size: int
) -> None:
    ids = byte_tokenizer.encode("hello ha ha")
    params = SamplingParams(stop=(" ha ha ha",))
    assert run(scanner(params, byte_tokenizer), [*ids, EOS, *ids], size) == (
        [*ids, EOS],
        "stop",
        "hello ha ha",
    )
    params = SamplingParams(stop=(" ha ha ha",), max_tokens=len(ids))
    assert run(scanner(params, byte_tokenizer), ids, size) == (ids, "length", "hello ha ha")


@pytest.mark.parametrize("size", BLOCKS)
def test_a_stop_token_leaves_no_text(byte_tokenizer: PreTrainedTokenizerFast, size: int) -> None:
    ids = byte_tokenizer.encode("hello world!")
    params = SamplingParams(stop_token_ids=(ids[-1],))
    assert run(scanner(params, byte_tokenizer), [*ids, *ids], size) == (
        ids,
        "stop",
        byte_tokenizer.decode(ids[:-1]),
    )


@pytest.mark.parametrize("size", BLOCKS)
def test_a_character_cut_by_the_limit_is_shown_as_decoding_shows_it(
    byte_tokenizer: PreTrainedTokenizerFast, size: int
) -> None:
    ids = byte_tokenizer.encode("ok 🙂")
    text = byte_tokenizer.decode(ids[:-1])
    assert text.endswith("\ufffd")
    assert run(scanner(SamplingParams(max_tokens=len(ids) - 1), byte_tokenizer), ids, size) == (
        ids[:-1],
        "length",
        text,
    )


@pytest.mark.parametrize("size", BLOCKS)
@pytest.mark.parametrize(
    ("stop", "shown"),
    [
        ("<eos>", "hello"),
        ("<pad>", "hello"),
        ("lo<eos>", "hel"),
        ("lo<pad>", "hel"),
        ("<pad> w", "hello"),
        ("o<p", "hell"),
        ("lo w", "hel"),
    ],
)
@pytest.mark.parametrize("ignore_eos", [True, False])
def test_a_stop_string_may_hold_special_tokens(
    byte_tokenizer: PreTrainedTokenizerFast, stop: str, shown: str, size: int, ignore_eos: bool
) -> None:
    before, special, after = map(byte_tokenizer.encode, ("hello", "<eos>", " world"))
    if "<eos>" not in stop:
        special = byte_tokenizer.encode("<pad>")
    ids, text = [*before, *special, *after, *after], ""
    for length in range(len(before), len(ids)):
        rendered = byte_tokenizer.decode(ids[:length])
        visible = byte_tokenizer.decode(ids[:length], skip_special_tokens=True)
        if stop in rendered or stop in visible:
            ids, text = ids[:length], shown
            break
    params = SamplingParams(stop=(stop,), ignore_eos=ignore_eos)
    assert text
    assert run(scanner(params, byte_tokenizer), ids + after, size) == (ids, "stop", text)


def test_a_special_token_before_the_fewest_tokens_stops_nothing(
    byte_tokenizer: PreTrainedTokenizerFast,
) -> None:
    ids = byte_tokenizer.encode("he<pad>llo<pad>")
    params = SamplingParams(stop=("<pad>",), min_tokens=len(byte_tokenizer.encode("he<pad>l")))
    committed, reason, text = run(scanner(params, byte_tokenizer), [*ids, *ids], 3)
    assert (committed, reason, text) == (ids, "stop", "hello")
