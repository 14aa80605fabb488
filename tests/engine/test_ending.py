"""An answer ends exactly as in plain decoding, whatever was drafted beyond: ids, reason,
log-probabilities, statistics, text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from d3d.engine.drafter import Draft, Target
from d3d.engine.request import Request, new_request
from d3d.engine.sampling import LogitRows, SamplingParams
from d3d.errors import InvalidRequest
from d3d.target.native import NativeTarget
from support.doubles import Double, always_wrong, noisy, oracle, scripted
from support.runs import PROMPT, SAMPLING, Run, Watched, run

BLOCK_SIZES = (1, 2, 4, 16)
LONG = 40


def beyond(target: NativeTarget, prompt: list[int] = PROMPT, **params: Any) -> list[int]:
    """Prompt and answer as if nothing but a distant limit ended it: what an oracle knows that does
    not know the end."""
    return run(target, prompt=prompt, **{"max_tokens": LONG, **params}).token_ids


def assert_same(drafted: Run, plain: Run) -> None:
    assert (drafted.ids, drafted.finish_reason, drafted.text) == (
        plain.ids,
        plain.finish_reason,
        plain.text,
    )
    assert sum(stats.num_committed for stats in drafted.rounds) == len(drafted.ids) - 1
    assert [event.finish_reason for event in drafted.events[:-1]] == [None] * (
        len(drafted.events) - 1
    )
    assert drafted.events[-1].finish_reason == drafted.finish_reason


@pytest.mark.parametrize("sampling", ["greedy", "temperature"])
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_an_accepted_eos_ends_the_answer_at_every_position_of_a_block(
    target: NativeTarget, block_size: int, sampling: str
) -> None:
    params = SAMPLING[sampling] | {"max_tokens": LONG}
    answer = beyond(target, **params)
    firsts = [
        index
        for index, token_id in enumerate(answer)
        if index >= len(PROMPT) and token_id not in answer[len(PROMPT) : index]
    ]
    places = set()
    for end in firsts:
        eos = {answer[end]}
        plain = run(target, eos=eos, **params)
        assert (plain.ids, plain.finish_reason) == (answer[len(PROMPT) : end + 1], "stop")
        drafted = run(target, oracle(block_size, [answer]), eos=eos, **params)
        assert_same(drafted, plain)
        if drafted.rounds:
            last = drafted.rounds[-1]
            places.add(last.num_committed)
            cut = last.num_committed <= last.draft_length  # else the EOS was the bonus token
            assert (len(last.token_ids) == last.num_accepted) == cut
            assert last.num_accepted == last.num_committed - (not cut)
            assert last.draft_length >= last.num_accepted
    assert len(firsts) > 15
    if block_size <= 4:
        assert places == set(range(1, block_size + 2)), (
            "EOS at every place of a block, and as the bonus token"
        )


def test_no_bonus_token_follows_a_fully_accepted_block_that_ends_with_eos(
    target: NativeTarget,
) -> None:
    params = SAMPLING["hot"] | {"max_tokens": LONG}
    answer = beyond(target, **params)
    eos = answer[len(PROMPT) + 4]
    assert eos not in answer[len(PROMPT) : len(PROMPT) + 4]
    drafted = run(target, oracle(4, [answer]), eos={eos}, **params)
    (last,) = drafted.rounds
    assert (last.draft_length, last.num_accepted, last.num_committed) == (4, 4, 4)
    assert last.token_ids == tuple(drafted.ids[1:]), "no bonus token"


def test_an_eos_that_the_target_rejects_ends_nothing(target: NativeTarget) -> None:
    answer = beyond(target)
    (eos, *_) = set(range(target.vocab_size)) - set(answer)
    for blocks in ([[eos]] * LONG, [[eos, *[1] * 15]] * LONG):
        drafted = run(target, scripted(16, blocks), eos={eos}, max_tokens=LONG)
        assert (drafted.token_ids, drafted.finish_reason) == (answer, "length")
        assert all(stats.num_accepted == 0 for stats in drafted.rounds)


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_never_more_than_max_tokens(target: NativeTarget, block_size: int) -> None:
    answer = beyond(target)
    for max_tokens in range(1, block_size + 3):
        plain = run(target, max_tokens=max_tokens)
        for drafter in (
            oracle(block_size, [answer]),
            always_wrong(block_size, [answer], target.vocab_size),
        ):
            watched = Watched(target)
            drafted = run(watched, drafter, max_tokens=max_tokens)
            assert_same(drafted, plain)
            assert (len(drafted.ids), drafted.finish_reason) == (max_tokens, "length")
            assert sum(len(ids) for batch in watched.fed for ids in batch) < len(
                PROMPT
            ) + max_tokens * (block_size + 1)
            assert all(stats.draft_length < max_tokens for stats in drafted.rounds), (
                "the last token needs no draft"
            )


def test_one_token_asks_no_drafter(target: NativeTarget) -> None:
    def never(*_: Any) -> Draft:
        raise AssertionError("asked")

    for max_tokens in (1, 2):  # the second is a round of its own, but its token is the bonus token
        drafted = run(target, Double(4, never), max_tokens=max_tokens)
        assert (len(drafted.ids), drafted.faults) == (max_tokens, [])


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_min_tokens_counts_tokens_and_not_rounds(target: NativeTarget, block_size: int) -> None:
    """A bias makes the end token the choice everywhere, until min_tokens are there."""
    eos = 11
    for ending in ({"eos": {eos}}, {"stop_token_ids": (eos,)}):
        for min_tokens in range(block_size + 3):
            params = {
                "logit_bias": {eos: 100.0},
                "min_tokens": min_tokens,
                "max_tokens": LONG,
            } | ending
            plain = run(target, **params)
            assert plain.ids.index(eos) == len(plain.ids) - 1 == max(min_tokens, 0)
            for drafter in (
                oracle(block_size, [plain.token_ids]),
                noisy(0.4, 2, block_size, [plain.token_ids], target.vocab_size),
                scripted(block_size, [[eos] * block_size] * LONG),
            ):
                assert_same(run(target, drafter, **params), plain)


def test_a_model_without_eos_runs_to_the_limit(target: NativeTarget) -> None:
    answer = beyond(target)
    drafted = run(target, oracle(4, [answer]), eos=set(), max_tokens=LONG)
    assert (drafted.token_ids, drafted.finish_reason) == (answer, "length")


@pytest.mark.parametrize("prompt", [[0], [96], [5]])
@pytest.mark.parametrize("sampling", ["greedy", "temperature", "greedy penalties"])
def test_a_prompt_of_one_token(target: NativeTarget, prompt: list[int], sampling: str) -> None:
    params = SAMPLING[sampling] | {"max_tokens": LONG}
    plain = run(target, prompt=prompt, **params)
    assert len(plain.ids) == LONG
    for drafter in (
        oracle(4, [plain.token_ids]),
        noisy(0.4, 2, 4, [plain.token_ids], target.vocab_size),
    ):
        assert_same(run(target, drafter, prompt, **params), plain)


@pytest.mark.parametrize("length", [1, 28, 30, 31])
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_prompt_and_answer_never_pass_the_context(
    make_target: Any, length: int, block_size: int
) -> None:
    short = make_target(max_position_embeddings=32)
    prompt = [(7 * index + 3) % 97 for index in range(length)]
    # The same weights with more room: the oracle knows how it would go on.
    answer = beyond(make_target(), prompt)
    plain = run(short, prompt=prompt, max_tokens=1000)
    assert (plain.token_ids, plain.finish_reason) == (answer[:32], "length")
    for drafter in (oracle(block_size, [answer]), scripted(block_size, [[1] * 16] * 32)):
        watched = Watched(short)
        assert_same(run(watched, drafter, prompt, max_tokens=1000), plain)
        assert max((length for lengths in watched.lengths for length in lengths), default=0) < 32


def test_a_prompt_that_fills_the_context_is_refused(make_target: Any) -> None:
    with pytest.raises(InvalidRequest, match="no room"):
        run(make_target(max_position_embeddings=32), prompt=[1] * 32)


@pytest.fixture(scope="module")
def writer(make_target: Any, byte_tokenizer: PreTrainedTokenizerFast) -> NativeTarget:
    """A target that knows the tokenizer's ids."""
    return make_target(vocab_size=len(byte_tokenizer), seed=1)


def drafters(target: Target, answer: list[int]) -> list[Double]:
    return [
        drafter
        for block_size in BLOCK_SIZES
        for drafter in (
            oracle(block_size, [answer]),
            noisy(0.3, 4, block_size, [answer], target.vocab_size),
        )
    ]


SPELLED = "ok 🙂 ha ha ha, 你好世界 naïve café hello world"


class Speller(Target):
    """A double of the target: writes a given text, over and over, whatever has been committed."""

    vocab_size = max_length = 0

    def __init__(self, ids: list[int], vocab_size: int) -> None:
        self.ids, self.vocab_size, self.max_length = ids, vocab_size, 512

    def prefill(self, requests: Sequence[Request], num_rows: int) -> list[LogitRows | None]:
        return [self._rows(request, 1) for request in requests]

    def verify(self, requests: Sequence[Request], drafts: Sequence[Draft]) -> list[LogitRows]:
        pairs = zip(requests, drafts, strict=True)
        return [self._rows(request, len(draft.token_ids) + 1) for request, draft in pairs]

    def _rows(self, request: Request, rows: int) -> LogitRows:
        logits = torch.zeros(rows, self.vocab_size)
        for row in range(rows):
            logits[row, self.ids[(request.num_answer_tokens + row) % len(self.ids)]] = 20.0
        return LogitRows(logits)

    def rewind(self, requests: Sequence[Request]) -> None:
        pass

    def end(self, request: Request) -> None:
        pass


@pytest.fixture(scope="module")
def speller(byte_tokenizer: PreTrainedTokenizerFast) -> Speller:
    return Speller(list(byte_tokenizer.encode(SPELLED)), len(byte_tokenizer))


@pytest.mark.parametrize("sampling", ["greedy", "hot"])
def test_streamed_text_equals_plain_and_the_decoded_whole(
    writer: NativeTarget, byte_tokenizer: Any, sampling: str
) -> None:
    """Random ids: mostly half characters."""
    params = SAMPLING[sampling] | {"max_tokens": LONG, "tokenizer": byte_tokenizer}
    plain = run(writer, **params)
    assert plain.text == byte_tokenizer.decode(plain.ids, skip_special_tokens=True)
    for drafter in drafters(writer, plain.token_ids):
        assert_same(run(writer, drafter, **params), plain)


def test_a_character_may_be_split_over_blocks(speller: Speller, byte_tokenizer: Any) -> None:
    for max_tokens in (len(speller.ids), len(speller.ids) - 3):
        plain = run(speller, max_tokens=max_tokens, tokenizer=byte_tokenizer)
        assert plain.ids == speller.ids[:max_tokens]
        assert SPELLED.startswith(plain.text)
        for drafter in drafters(speller, plain.token_ids):
            drafted = run(speller, drafter, max_tokens=max_tokens, tokenizer=byte_tokenizer)
            assert_same(drafted, plain)
            assert not any("\ufffd" in event.text for event in drafted.events)


@pytest.mark.parametrize("stop", [" ha ha ha", "ha ha", "o w", "界", "🙂", "aïv", "llo"])
@pytest.mark.parametrize("min_tokens", [0, 12])
def test_stop_strings_split_over_blocks(
    speller: Speller, byte_tokenizer: Any, stop: str, min_tokens: int
) -> None:
    params = {
        "stop": (stop,),
        "min_tokens": min_tokens,
        "logprobs": 2,
        "max_tokens": 2 * len(speller.ids),
        "tokenizer": byte_tokenizer,
    }
    plain = run(speller, **params)
    assert plain.finish_reason == "stop"
    whole = byte_tokenizer.decode(plain.ids)
    assert stop in whole
    assert stop not in byte_tokenizer.decode(plain.ids[:-1])[max(0, len(plain.text) - 1) :]
    for drafter in drafters(speller, PROMPT + speller.ids * 2):
        drafted = run(speller, drafter, **params)
        assert_same(drafted, plain)
        assert [entry.token_id for entry in drafted.logprobs] == drafted.ids
        assert whole.startswith(drafted.text + stop)


def test_min_tokens_are_refused_if_every_token_ends_the_answer(target: NativeTarget) -> None:
    every = tuple(range(1, target.vocab_size))
    params = SamplingParams(min_tokens=2, stop_token_ids=every)
    with pytest.raises(InvalidRequest, match=r"min_tokens: .* every token ends it"):
        new_request(target, [1], params, eos_token_ids=frozenset({0}))
    for allowed in (
        params.model_copy(update={"min_tokens": 0}),
        params.model_copy(update={"ignore_eos": True}),
    ):
        new_request(target, [1], allowed, eos_token_ids=frozenset({0}))
