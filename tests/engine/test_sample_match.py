"""Whatever is drafted, the committed tokens are the target's own, greedy and sampled."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable

import pytest
import torch
from scipy import stats
from torch import Tensor

from d3d.engine.noise import uniform
from d3d.engine.request import Request
from d3d.engine.sampling import LogitRows, SamplingParams, TokenCounts, Verdict, sample_match
from support.drafters import grow

VOCAB = 10


def one_hot(token_ids: list[int]) -> Tensor:
    return torch.nn.functional.one_hot(torch.tensor(token_ids), VOCAB).float() * 5


class ToyTarget:
    """Random but fixed logits after each pair of last tokens."""

    def __init__(self, vocab_size: int = VOCAB, seed: int = 0) -> None:
        self.table = (
            torch.randn(
                vocab_size, vocab_size, vocab_size, generator=torch.Generator().manual_seed(seed)
            )
            * 2
        )

    def rows(self, token_ids: list[int], draft: list[int]) -> Tensor:
        history = [*token_ids, *draft]
        ends = range(len(token_ids), len(history) + 1)
        return torch.stack([self.table[history[end - 2], history[end - 1]] for end in ends])


def matched(logits: Tensor, draft: list[int], request: Request) -> Verdict:
    return sample_match(LogitRows(logits), draft, request)


def start(params: SamplingParams, seed: int = 0, vocab_size: int = VOCAB) -> Request:
    request = Request([1, 2], params, seed=seed)
    if params.uses_counts:
        request.counts = TokenCounts([1, 2], vocab_size, torch.device("cpu"))
    return request


def decode(
    target: ToyTarget,
    request: Request,
    draft_after: Callable[[list[int]], list[int]],
    num_tokens: int,
) -> list[Verdict]:
    """Rounds until there are enough tokens; the counts are checked after each."""
    verdicts = []
    while request.num_answer_tokens < num_tokens:
        draft = draft_after(request.token_ids)
        verdict = matched(target.rows(request.token_ids, draft), draft, request)
        grow(request, verdict.token_ids)
        verdicts.append(verdict)
        if request.counts is not None:
            histogram = Counter(request.answer_ids)
            assert request.counts.answer.tolist() == [
                histogram[token_id] for token_id in range(VOCAB)
            ]
    return verdicts


def no_draft(_: list[int]) -> list[int]:
    return []


@pytest.mark.parametrize("block_size", [1, 2, 4, 16])
def test_the_first_drafted_token_is_checked_too(block_size: int) -> None:
    verdict = matched(one_hot([3] * (block_size + 1)), [4] * block_size, start(SamplingParams()))
    assert verdict == Verdict((), 3)


@pytest.mark.parametrize("temperature", [0.0, 0.02])
def test_only_the_prefix_counts_as_accepted(temperature: float) -> None:
    """Right, wrong, right, right: one accepted, and the bonus token is not counted."""
    verdict = matched(
        one_hot([1, 2, 3, 4, 5]),
        [1, 9, 3, 4],
        start(SamplingParams(temperature=temperature)),
    )
    assert verdict == Verdict((1,), 2)
    assert verdict.num_accepted == 1
    assert verdict.token_ids == (1, 2)


@pytest.mark.parametrize("block_size", [1, 2, 4, 16])
def test_every_rejection_position(block_size: int) -> None:
    truth = [index % VOCAB for index in range(block_size + 1)]
    for position in range(block_size + 1):
        draft = truth[:-1]
        if position < block_size:
            draft[position] = (draft[position] + 1) % VOCAB
        verdict = matched(one_hot(truth), draft, start(SamplingParams()))
        assert verdict == Verdict(tuple(truth[:position]), truth[position])


def test_without_a_draft_it_is_plain_decoding() -> None:
    assert matched(one_hot([6]), [], start(SamplingParams())) == Verdict((), 6)


@pytest.mark.parametrize("drafted", [-1, VOCAB, 10**6])
def test_an_impossible_drafted_id_is_simply_rejected(drafted: int) -> None:
    assert matched(one_hot([6, 7]), [drafted], start(SamplingParams(temperature=0.01))) == Verdict(
        (), 6
    )


SETTINGS = [
    {},
    {"temperature": 1.0},
    {"temperature": 2.0, "top_k": 4, "min_p": 0.01},
    {"temperature": 0.8, "top_p": 0.9},
    {"frequency_penalty": 2.0},
    {"frequency_penalty": -2.0},
    {"temperature": 1.0, "repetition_penalty": 1.4, "presence_penalty": 0.5},
    {"temperature": 1.0, "logit_bias": {5: 3.0}, "min_tokens": 10, "stop_token_ids": (3,)},
]


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("block_size", [1, 2, 4, 16])
@pytest.mark.parametrize("wrong_at", [0, 1, 3, 15, None])
def test_any_draft_gives_the_plain_answer(
    settings: dict[str, object], block_size: int, wrong_at: int | None
) -> None:
    """The drafter knows the plain answer, and errs at one position of each block."""
    params = SamplingParams.model_validate({**settings, "logprobs": 3})
    target, num_tokens = ToyTarget(), 40
    plain = start(params, seed=7)
    plain_verdicts = decode(target, plain, no_draft, num_tokens + block_size + 1)

    def draft(token_ids: list[int]) -> list[int]:
        block = plain.token_ids[len(token_ids) : len(token_ids) + block_size]
        if wrong_at is not None and wrong_at < block_size:
            block[wrong_at] = (block[wrong_at] + 1) % VOCAB
        return block

    request = start(params, seed=7)
    verdicts = decode(target, request, draft, num_tokens)
    length = request.num_answer_tokens
    assert request.answer_ids == plain.answer_ids[:length]
    expected = block_size if wrong_at is None or wrong_at >= block_size else wrong_at
    assert all(verdict.num_accepted == expected for verdict in verdicts[:-1])
    reported = [entry for verdict in verdicts for entry in verdict.logprobs]
    wanted = [entry for verdict in plain_verdicts for entry in verdict.logprobs][:length]
    for entry, want in zip(reported, wanted, strict=True):
        assert entry.token_id == want.token_id
        assert entry.logprob == pytest.approx(want.logprob, abs=1e-4)
        assert dict(entry.top) == pytest.approx(dict(want.top), abs=1e-4)
        assert entry.token_id in dict(entry.top)


def test_the_sign_of_the_frequency_penalty_matters() -> None:
    answers = []
    for penalty in (-2.0, 0.0, 2.0):
        request = start(SamplingParams(frequency_penalty=penalty))
        decode(ToyTarget(), request, no_draft, 30)
        answers.append(request.answer_ids)
    assert len({tuple(answer) for answer in answers}) == 3


@pytest.mark.parametrize("temperature", [0, 1e-12, 1e-8, 1e-6, 1e-5, 1e-4])
def test_tiny_temperatures_give_the_greedy_answer(temperature: float) -> None:
    target = ToyTarget()
    greedy, other = start(SamplingParams()), start(SamplingParams(temperature=temperature), seed=3)
    decode(target, greedy, no_draft, 40)
    decode(target, other, lambda ids: greedy.token_ids[len(ids) : len(ids) + 4], 40)
    assert other.answer_ids[:40] == greedy.answer_ids[:40]


def test_a_seed_repeats_and_another_seed_differs() -> None:
    answers = []
    for seed in (42, 42, 43):
        request = start(SamplingParams(temperature=2.0), seed=seed)
        decode(ToyTarget(), request, no_draft, 30)
        answers.append(request.answer_ids)
    assert answers[0] == answers[1] != answers[2]


def test_a_verdict_leaves_its_arguments_alone() -> None:
    request = start(
        SamplingParams(
            temperature=1.0,
            frequency_penalty=1.0,
            logit_bias={1: 2.0},
            min_tokens=5,
            stop_token_ids=(2,),
        )
    )
    logits, draft = ToyTarget().rows(request.token_ids, [3, 4]), [3, 4]
    before = logits.clone()
    first = matched(logits, draft, request)
    assert first == matched(logits, draft, request)
    assert torch.equal(logits, before)
    assert (request.token_ids, draft) == ([1, 2], [3, 4])


JOINT_VOCAB, NUM_DRAWS = 4, 6000


def drafts_of(kind: str, target: ToyTarget, seed: int) -> list[int]:
    """Two drafted tokens: likeliest, least likely, random, or the very tokens that plain decoding
    samples."""
    if kind == "random":
        return [int(uniform(seed + 10**6, place) * JOINT_VOCAB) for place in (0, 1)]
    if kind == "own":
        request = start(SamplingParams(temperature=1.0), seed=seed)
        decode(target, request, no_draft, 2)
        return request.answer_ids[:2]
    draft: list[int] = []
    for _ in range(2):
        row = target.rows([1, 2, *draft], [])[0]
        draft.append(int(row.argmax() if kind == "best" else row.argmin()))
    return draft


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["best", "worst", "random", "own"])
@pytest.mark.parametrize("settings", [{"temperature": 1.0}, {"temperature": 0.7, "top_k": 3}])
def test_two_tokens_have_the_exact_joint_distribution(
    kind: str, settings: dict[str, object]
) -> None:
    target = ToyTarget(JOINT_VOCAB, seed=4)
    target.table /= 2
    params = SamplingParams.model_validate(settings)
    seen: Counter[tuple[int, int]] = Counter()
    for seed in range(NUM_DRAWS):
        request = start(params, seed=seed, vocab_size=JOINT_VOCAB)
        draft = drafts_of(kind, target, seed)
        while request.num_answer_tokens < 2:
            verdict = matched(target.rows(request.token_ids, draft), draft, request)
            grow(request, verdict.token_ids)
            draft = draft[:1]
        seen[request.answer_ids[0], request.answer_ids[1]] += 1

    def exact(row: Tensor) -> Tensor:
        row = row / params.temperature
        if params.top_k:
            row = row.masked_fill(row < row.topk(params.top_k).values[-1], -torch.inf)
        return row.double().softmax(-1)

    first = exact(target.table[1, 2])
    second = torch.stack([exact(target.table[2, token_id]) for token_id in range(JOINT_VOCAB)])
    joint = first[:, None] * second
    everything = itertools.product(range(JOINT_VOCAB), range(JOINT_VOCAB))
    pairs = [pair for pair in everything if joint[pair] > 0]
    assert set(seen) <= set(pairs)
    expected = [float(joint[pair]) * NUM_DRAWS for pair in pairs]
    assert min(expected) > 5
    assert stats.chisquare([seen[pair] for pair in pairs], expected, sum_check=False).pvalue > 1e-3
