"""Each sampling parameter acts as documented, in the documented order, at every row of a block as
in plain decoding."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from d3d.engine.choice_gap import choice_gap
from d3d.engine.noise import uniform
from d3d.engine.request import Request
from d3d.engine.round import TokenLogprob
from d3d.engine.sampling import (
    GREEDY_TEMPERATURE,
    Choices,
    LogitRows,
    SamplingParams,
    TokenCounts,
    choose,
    inverse_cdf,
    validate_params,
)
from d3d.errors import InvalidRequest
from support.drafters import grow

VOCAB = 12
EOS = 11
NO_EOS: frozenset[int] = frozenset()


def request(
    params: SamplingParams,
    prompt: tuple[int, ...] = (1, 2),
    answer: tuple[int, ...] = (),
    seed: int = 0,
) -> Request:
    made = Request(list(prompt), params, seed=seed)
    if params.uses_counts:
        made.counts = TokenCounts(prompt, VOCAB, torch.device("cpu"))
    grow(made, answer)
    return made


def chosen(
    logits: Tensor, draft: Sequence[int], made: Request, eos: frozenset[int] = NO_EOS
) -> Choices:
    made.eos_token_ids = eos
    return choose(LogitRows(logits), draft, made)


def rows(num: int, seed: int = 0) -> Tensor:
    return torch.randn(num, VOCAB, generator=torch.Generator().manual_seed(seed)) * 2


def distribution(logits: Tensor, made: Request, eos: frozenset[int] = NO_EOS) -> list[float]:
    """What is really sampled from, read off the reported log-probabilities."""
    params = made.params.model_copy(update={"logprobs": VOCAB})
    copy = request(
        params, tuple(made.token_ids[: made.prompt_length]), tuple(made.answer_ids), made.seed
    )
    (entry,) = chosen(logits.reshape(1, -1), (), copy, eos).logprobs
    found = dict(entry.top)
    return [
        math.exp(found[token_id]) if token_id in found else 0.0
        for token_id in range(logits.numel())
    ]


def reference(logits: Tensor, made: Request, eos: frozenset[int] = NO_EOS) -> np.ndarray:
    """The same by the module's docstring, in plain float64 loops (sampling, no ties)."""
    params, prompt, answer = made.params, made.token_ids[: made.prompt_length], made.answer_ids
    scores = logits.double().numpy().copy()
    for token_id in range(VOCAB):
        if token_id in prompt or token_id in answer:
            factor = params.repetition_penalty
            scores[token_id] = (
                scores[token_id] / factor if scores[token_id] > 0 else scores[token_id] * factor
            )
        if token_id in answer:
            scores[token_id] -= params.presence_penalty + params.frequency_penalty * answer.count(
                token_id
            )
        scores[token_id] += params.logit_bias.get(token_id, 0.0)
        if len(answer) < params.min_tokens and (
            token_id in params.stop_token_ids or (token_id in eos and not params.ignore_eos)
        ):
            scores[token_id] = -math.inf
    weights = np.exp((scores - scores.max()) / params.temperature)
    best_first = np.argsort(-weights)
    if params.top_k:
        weights[best_first[params.top_k :]] = 0.0
    weights /= weights.sum()
    before = np.cumsum(weights[best_first]) - weights[best_first]
    weights[best_first[before >= params.top_p]] = 0.0
    weights[weights < params.min_p * weights.max()] = 0.0
    return np.asarray(weights / weights.sum())


SETTINGS = [
    {"temperature": 0.5},
    {"temperature": 2.0, "top_k": 3},
    {"temperature": 1.0, "top_p": 0.8},
    {"temperature": 1.5, "top_p": 0.05},
    {"temperature": 1.0, "min_p": 0.1},
    {"temperature": 0.7, "top_k": 6, "top_p": 0.7, "min_p": 0.05},
    {"temperature": 1.0, "repetition_penalty": 1.7},
    {"temperature": 1.0, "presence_penalty": 0.8, "frequency_penalty": -0.6},
    {"temperature": 1.0, "logit_bias": {3: 2.0, 4: -1.5}},
    {"temperature": 1.0, "min_tokens": 9, "stop_token_ids": (0, 5)},
    {"temperature": 1.0, "min_tokens": 9, "stop_token_ids": (0,), "ignore_eos": True},
    {
        "temperature": 1.3,
        "top_k": 8,
        "top_p": 0.9,
        "min_p": 0.02,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.3,
        "frequency_penalty": 0.4,
        "logit_bias": {2: 1.0, 11: 9.0},
        "min_tokens": 6,
        "stop_token_ids": (4,),
    },
]


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("seed", range(3))
def test_the_distribution_is_the_documented_one(settings: dict[str, object], seed: int) -> None:
    made = request(
        SamplingParams.model_validate(settings), prompt=(1, 2, 2), answer=(3, 4, 3, 3, 8)
    )
    logits = rows(1, seed)[0]
    eos = frozenset({EOS})
    np.testing.assert_allclose(
        distribution(logits, made, eos), reference(logits, made, eos), rtol=1e-4, atol=1e-7
    )


@pytest.mark.parametrize(
    "settings",
    [*SETTINGS, {}, {"repetition_penalty": 1.7, "frequency_penalty": 1.0}, {"min_tokens": 7}],
)
@pytest.mark.parametrize("seed", range(3))
def test_a_row_of_a_block_is_treated_as_plain_decoding_would(
    settings: dict[str, object], seed: int
) -> None:
    """The draft is the target's own answer, so all rows are used; ids, log-probabilities and the
    list agree."""
    params = SamplingParams.model_validate({**settings, "logprobs": 3})
    logits = rows(9, seed)
    plain = request(params, prompt=(1, 2, 2), answer=(3, 4), seed=seed)
    entries: list[TokenLogprob] = []
    for row in logits:
        choices = chosen(row[None], (), plain, frozenset({EOS}))
        grow(plain, choices.token_ids)
        entries += choices.logprobs
    block = request(params, prompt=(1, 2, 2), answer=(3, 4), seed=seed)
    draft = plain.answer_ids[2:-1]
    assert chosen(logits, draft, block, frozenset({EOS})) == Choices(
        plain.answer_ids[2:], tuple(entries)
    )


@pytest.mark.parametrize("settings", SETTINGS)
def test_rows_taken_together_equal_rows_taken_one_by_one(
    settings: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    params = SamplingParams.model_validate({**settings, "logprobs": 2})
    made, logits = request(params, answer=(3, 4)), rows(6)
    draft: list[int] = []
    while len(draft) < 5:
        draft.append(chosen(logits[: len(draft) + 1], draft, made, frozenset({EOS})).token_ids[-1])
    one_by_one = chosen(logits, draft, made, frozenset({EOS}))
    monkeypatch.setattr("d3d.engine.sampling._ROW_BY_ROW", frozenset())
    together = chosen(logits, draft, made, frozenset({EOS}))
    assert together.token_ids == one_by_one.token_ids
    for first, second in zip(together.logprobs, one_by_one.logprobs, strict=True):
        assert first.logprob == pytest.approx(second.logprob, abs=1e-5)


@pytest.mark.parametrize("settings", [{}, {"temperature": 1.0}, {"frequency_penalty": 1.0}])
def test_rows_behind_a_mismatch_do_not_matter(settings: dict[str, object]) -> None:
    made, logits = request(SamplingParams.model_validate(settings)), rows(5)
    first = chosen(logits[:1], (), made).token_ids[0]
    wrong = (first + 1) % VOCAB
    logits[1:] = math.nan
    assert chosen(logits, [wrong, 0, 1, 2], made).token_ids[0] == first


@pytest.mark.parametrize("num_rows", [1, 3, 5])
def test_a_wrong_number_of_rows_is_an_error(num_rows: int) -> None:
    with pytest.raises(ValueError, match="3 drafted tokens need 4 rows"):
        chosen(rows(num_rows), [1, 2, 3], request(SamplingParams()))


def test_missing_counts_are_an_error_not_a_silent_no_penalty() -> None:
    with pytest.raises(ValueError, match="counts"):
        chosen(rows(1), (), Request([1], SamplingParams(presence_penalty=1.0)))


@pytest.mark.parametrize("temperature", [0.0, 1e-12, 1e-8, 1e-6, 1e-5])
@pytest.mark.parametrize("scale", [1.0, 1e4, 1e30])
def test_up_to_the_threshold_every_branch_is_greedy(temperature: float, scale: float) -> None:
    params = SamplingParams(temperature=temperature, top_k=5, top_p=0.1, min_p=0.9, logprobs=4)
    made, logits = request(params), rows(1) * scale
    choices = chosen(logits, (), made)
    assert choices.token_ids == logits.argmax(-1).tolist()
    expected = logits[0].log_softmax(-1)
    assert choices.logprobs[0].logprob == pytest.approx(float(expected.max()), abs=1e-6)
    assert [token_id for token_id, _ in choices.logprobs[0].top] == expected.topk(
        4
    ).indices.tolist()


@pytest.mark.parametrize("scale", [1.0, 1e4, 1e30])
@pytest.mark.parametrize("temperature", [1.01 * GREEDY_TEMPERATURE, 1e-4])
def test_just_above_the_threshold_nothing_overflows(temperature: float, scale: float) -> None:
    params = SamplingParams(
        temperature=temperature, top_p=0.9, min_p=0.1, logprobs=2, logit_bias={3: 1e6}
    )
    logits = rows(4) * scale
    draft = logits.index_add(1, torch.tensor([3]), torch.full((4, 1), 1e6)).argmax(-1).tolist()
    choices = chosen(logits, draft[:-1], request(params))
    assert choices.token_ids == draft
    assert all(entry.logprob == pytest.approx(0.0, abs=1e-6) for entry in choices.logprobs)


def test_the_first_of_equal_logits_is_chosen() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, [4, 7]] = 1.0
    for params in (SamplingParams(), SamplingParams(logprobs=1)):
        assert chosen(logits, (), request(params)).token_ids == [4]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [1, 7, 16, 97, 1000, 49152])
def test_the_lowest_id_of_equals_is_the_best_in_any_dtype(dtype: torch.dtype, width: int) -> None:
    """bfloat16 logits often tie; plain decoding and a block must break the tie alike."""
    generator = torch.Generator().manual_seed(width)
    raw = torch.randint(-3, 4, (9, width), generator=generator).to(dtype)
    raw[0] = 1.0
    raw[1] = -1.0
    raw[1, width // 2 :] = 2.0
    expected = [(row == row.max()).nonzero()[0, 0].item() for row in raw]
    assert LogitRows(raw).argmax() == expected
    assert [LogitRows(raw[row : row + 1]).argmax()[0] for row in range(9)] == expected
    assert LogitRows(raw.T.contiguous().T).argmax() == expected, "however the rows lie in memory"
    request_ = Request([1])
    assert choose(LogitRows(raw), expected[:-1], request_).token_ids == expected


@pytest.mark.parametrize("settings", [{"min_p": 1.0}, {"top_k": 1}, {"top_p": 1e-9}])
def test_the_narrowest_filters_equal_greedy(settings: dict[str, float]) -> None:
    logits = rows(8)
    greedy = logits.argmax(-1).tolist()
    made = request(SamplingParams.model_validate({"temperature": 3.0, **settings}), seed=5)
    assert chosen(logits, greedy[:-1], made).token_ids == greedy


def test_top_p_looks_beyond_the_best_thousand() -> None:
    """A flat distribution over 5000 tokens: half of them are needed for p = 0.5, whatever is
    searched first."""
    logits = torch.linspace(0.0, 1e-3, 5000)[None]
    params = SamplingParams(temperature=1.0, top_p=0.5)
    picks = {
        chosen(logits, (), Request([1], params, seed=seed)).token_ids[0] for seed in range(400)
    }
    assert 2490 < min(picks) < 2550
    assert max(picks) > 4950


@pytest.mark.parametrize("temperature", [0.0, 1.5])
@pytest.mark.parametrize("num_drafted", [0, 3])
def test_logit_bias_rules_at_every_row(temperature: float, num_drafted: int) -> None:
    logits, draft = rows(num_drafted + 1), [5] * num_drafted
    always = request(SamplingParams(temperature=temperature, logit_bias={5: 100.0}))
    assert chosen(logits, draft, always).token_ids == [5] * (num_drafted + 1)
    logits[:, 5] = 50.0
    never = request(SamplingParams(temperature=temperature, logit_bias={5: -100.0}))
    assert 5 not in chosen(logits, draft, never).token_ids


def test_frequency_penalty_counts_repetition_inside_a_block() -> None:
    """Token 5 leads by 2.5: at a penalty of 1 per occurrence it comes three times, then 6 takes
    over."""
    logits = torch.zeros(5, VOCAB)
    logits[:, 5], logits[:, 6] = 12.5, 10.0
    made = request(SamplingParams(frequency_penalty=1.0))
    assert chosen(logits, [5, 5, 5, 5], made).token_ids[:4] == [5, 5, 5, 6]
    made = request(SamplingParams(frequency_penalty=-1.0), answer=(6, 6, 6))
    assert chosen(logits, [6, 6, 6, 6], made).token_ids == [6] * 5


def test_rejected_tokens_leave_no_trace() -> None:
    made = request(
        SamplingParams(frequency_penalty=1.0, repetition_penalty=1.3, logprobs=2), answer=(3,)
    )
    logits = rows(5)
    before = chosen(logits[:1], (), made)
    assert made.counts is not None
    counts = made.counts.answer.clone()
    chosen(logits, [9, 9, 8, 8], made)
    assert torch.equal(made.counts.answer, counts)
    assert made.token_ids == [1, 2, 3]
    assert chosen(logits[:1], (), made) == before


@pytest.mark.parametrize("min_tokens", range(7))
@pytest.mark.parametrize("num_answered", range(3))
@pytest.mark.parametrize("how", ["eos", "stop_token_ids"])
def test_end_tokens_are_banned_for_exactly_min_tokens(
    min_tokens: int, num_answered: int, how: str
) -> None:
    """A model that always wants to end, over a block of four drafted tokens."""
    logits = torch.zeros(5, VOCAB)
    logits[:, EOS], logits[:, 4] = 9.0, 5.0
    params = SamplingParams(
        min_tokens=min_tokens, stop_token_ids=(EOS,) if how == "stop_token_ids" else ()
    )
    eos = frozenset({EOS}) if how == "eos" else NO_EOS
    made = request(params, answer=(4,) * num_answered)
    num_banned = max(0, min_tokens - num_answered)
    expected = [4] * min(5, num_banned) + [EOS] * max(0, 5 - num_banned)
    assert chosen(logits, expected[:4], made, eos).token_ids == expected


def test_ignored_eos_is_not_banned() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, EOS] = 9.0
    made = request(SamplingParams(min_tokens=5, ignore_eos=True))
    assert chosen(logits, (), made, frozenset({EOS})).token_ids == [EOS]


@pytest.mark.parametrize("noise", [0.0, 0.25, 0.5, 1 - 2.0**-53, 1.0])
def test_a_token_of_probability_zero_is_never_chosen(noise: float) -> None:
    sums_below_one = torch.full((1, 30000), 1 / 30000)
    sums_below_one[0, -5000:] = 0.0
    for probabilities in (
        torch.tensor([[0.0, 0.25, 0.0, 0.25, 0.5, 0.0, 0.0]]),
        torch.tensor([[0.0, 0.0, 1.0, 0.0]]),
        torch.tensor([[1.0, 0.0]]),
        torch.tensor([[0.0, 1.0, 1e-30, 0.0]]),
        sums_below_one,
    ):
        (token_id,) = inverse_cdf(probabilities, [noise])
        assert probabilities[0, token_id] > 0


def test_the_inverse_goes_in_id_order() -> None:
    probabilities = torch.tensor([[0.25, 0.5, 0.0, 0.25]]).expand(6, -1)
    assert inverse_cdf(probabilities, [0.0, 0.2499, 0.25, 0.7499, 0.75, 0.9999]) == [
        0,
        0,
        1,
        1,
        3,
        3,
    ]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_the_share_of_the_best_token_follows_the_temperature(temperature: float) -> None:
    logits = torch.tensor([[2.0, 1.5, 1.0, 0.5]])
    params = SamplingParams(temperature=temperature)
    picks = [
        chosen(logits, (), Request([1], params, seed=seed)).token_ids[0] for seed in range(4000)
    ]
    expected = float((logits / temperature).softmax(-1)[0, 0])
    assert abs(picks.count(0) / 4000 - expected) < 4 * math.sqrt(expected * (1 - expected) / 4000)


def test_noise_belongs_to_the_absolute_position() -> None:
    """The same position draws the same, however many tokens of it are prompt, answer or draft."""
    params = SamplingParams(temperature=2.0)
    logits = rows(1, 3).expand(4, -1)
    by_prompt = [
        chosen(logits[:1], (), request(params, (1,) * length)).token_ids[0]
        for length in range(4, 8)
    ]
    by_answer = [
        chosen(logits[:1], (), request(params, (1,), (1,) * length)).token_ids[0]
        for length in range(3, 7)
    ]
    by_draft = chosen(logits, by_prompt[:3], request(params, (1,) * 4)).token_ids
    assert by_prompt == by_answer == by_draft


def test_log_probabilities_hold_the_chosen_token_and_nothing_impossible() -> None:
    params = SamplingParams(temperature=1.0, top_k=3, logprobs=5)
    for seed in range(20):
        (entry,) = chosen(rows(1), (), request(params, seed=seed)).logprobs
        assert (entry.token_id, entry.logprob) in entry.top
        assert len(entry.top) == 3
        assert sum(math.exp(value) for _, value in entry.top) == pytest.approx(1.0, abs=1e-5)
        assert all(first[1] >= second[1] for first, second in pairwise(entry.top))


def test_an_unlikely_choice_is_added_to_the_list() -> None:
    params = SamplingParams(temperature=100.0, logprobs=1)
    lengths = {
        len(chosen(rows(1), (), request(params, seed=seed)).logprobs[0].top) for seed in range(30)
    }
    assert lengths == {1, 2}


def test_zero_alternatives_still_report_the_chosen_one() -> None:
    (entry,) = chosen(rows(1), (), request(SamplingParams(logprobs=0))).logprobs
    assert entry.top == ()
    assert entry.logprob == pytest.approx(float(rows(1)[0].log_softmax(-1).max()))


def test_the_greedy_gap_is_relative_and_sees_the_processing() -> None:
    logits = torch.zeros(VOCAB)
    logits[3], logits[4] = 200.0, 199.0
    assert choice_gap(logits, request(SamplingParams())) == pytest.approx(1 / 200)
    assert choice_gap(logits[None], request(SamplingParams(logit_bias={4: 1.0}))) == 0.0
    assert choice_gap(logits / 400, request(SamplingParams())) == pytest.approx(1 / 400)


def test_the_sampling_gap_is_the_way_to_the_border() -> None:
    params = SamplingParams(temperature=1.0)
    point = uniform(9, 2)
    for border in (point - 0.01, point + 0.02):
        logits = torch.tensor([border, 1 - border]).log()
        made = request(params, seed=9)
        assert choice_gap(logits, made) == pytest.approx(
            min(abs(point - border), point if border > point else 1 - point), abs=1e-6
        )


@pytest.mark.parametrize("token_id", [-1, VOCAB, VOCAB + 5])
def test_ids_outside_of_the_vocabulary_are_refused_by_name(token_id: int) -> None:
    with pytest.raises(
        InvalidRequest, match=f"logit_bias: token id {token_id} .* 0 to {VOCAB - 1}"
    ):
        validate_params(SamplingParams(logit_bias={token_id: 1.0}), VOCAB)
    with pytest.raises(InvalidRequest, match=f"stop_token_ids: token id {token_id} "):
        validate_params(SamplingParams(stop_token_ids=(1, token_id)), VOCAB)


def test_ids_inside_of_the_vocabulary_pass() -> None:
    validate_params(
        SamplingParams(logit_bias={0: 1.0, VOCAB - 1: 1.0}, stop_token_ids=(0, VOCAB - 1)), VOCAB
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("logit_bias", {1: math.inf}),
        ("logit_bias", {1: math.nan}),
        ("presence_penalty", math.nan),
        ("repetition_penalty", 0.0),
        ("temperature", math.inf),
        ("temperature", -0.1),
        ("stop", ("",)),
        ("min_tokens", 500),
        ("max_tokens", 0),
        ("best_of", 2),
    ],
)
def test_impossible_values_are_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(ValidationError, match=name):
        SamplingParams.model_validate({name: value})
