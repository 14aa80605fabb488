"""From the target's raw logits to its own choice of each token.

Row i of a block follows the committed tokens and the first i drafted ones; it is treated exactly as
plain decoding would treat it there. The order in which the parameters act:

1. `repetition_penalty`, over prompt and answer: positive logits are divided by it, negative ones
   multiplied (CTRL, arXiv:1909.05858, section 4.1, in the form of transformers'
   RepetitionPenaltyLogitsProcessor)
2. `presence_penalty` once for each token that the answer holds, and `frequency_penalty` times its
   count there (OpenAI's)
3. `logit_bias` is added
4. `min_tokens`: while the answer is shorter, stop token ids, and EOS unless `ignore_eos`, become
   impossible
5. `temperature` divides. At or below GREEDY_TEMPERATURE the choice is the argmax here (lowest id
   among equals), steps 6 to 8 are skipped and log-probabilities are those at temperature 1
6. `top_k` keeps the k best logits
7. `top_p` keeps the smallest set of the best whose share of what is left reaches p
8. `min_p` keeps what is at least this likely relative to the best

A token that ties with the last one kept by 6, 7 or 8 is kept too, so that no sort order can matter.
Sampling takes one uniform number per absolute position and inverts the cumulative distribution in
id order. Counts come from `Request.counts` plus the drafted tokens before the row; nothing here is
remembered, so a rejected token leaves no trace."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from d3d.engine.noise import uniform
from d3d.engine.params import GREEDY_TEMPERATURE as GREEDY_TEMPERATURE
from d3d.engine.params import SamplingParams as SamplingParams
from d3d.engine.round import TokenLogprob
from d3d.errors import InvalidRequest, NotFinite

if TYPE_CHECKING:
    from d3d.engine.request import Request

_NUCLEUS_WIDTH = 1024
"""Number of best tokens searched for the top-p set before sorting all."""

NO_TOKEN = -1
"""The choice of a row whose largest logit is NaN (larger than any number here) or infinite."""

_ROW_BY_ROW = frozenset({"cpu"})
"""Device types that process rows one by one, up to the first mismatch; on others a launch costs
more than a row."""


class Choices(NamedTuple):
    """The target's own tokens, row by row, with log-probabilities."""

    token_ids: list[int]
    logprobs: tuple[TokenLogprob, ...] = ()
    """One entry per token if `params.logprobs` is set, else empty."""


def validate_params(params: SamplingParams, vocab_size: int) -> None:
    """Raise InvalidRequest if a parameter names a token id outside [0, vocab_size)."""
    for name, token_ids in (
        ("logit_bias", params.logit_bias),
        ("stop_token_ids", params.stop_token_ids),
    ):
        for token_id in token_ids:
            if not 0 <= token_id < vocab_size:
                raise InvalidRequest(
                    f"{name}: token id {token_id} is not in the target's vocabulary, use ids from "
                    f"0 to {vocab_size - 1}"
                )


class TokenCounts:
    """Occurrences of each token id in the prompt and in the answer; int32 tensors [vocab_size]."""

    def __init__(self, prompt_ids: Sequence[int], vocab_size: int, device: torch.device) -> None:
        ids = torch.tensor(list(prompt_ids), dtype=torch.long, device=device)
        self.prompt = torch.bincount(ids, minlength=vocab_size).to(torch.int32)
        self.answer = torch.zeros_like(self.prompt)

    def add(self, token_ids: Sequence[int]) -> None:
        for token_id in token_ids:
            self.answer[token_id] += 1


class LogitRows:
    """Logits of one request's rows in a target pass, converted only when needed."""

    __slots__ = ("raw",)

    def __init__(self, raw: Tensor) -> None:
        """raw: logits as the pass returned them, [rows, vocab_size], any float dtype."""
        self.raw = raw

    def __len__(self) -> int:
        return self.raw.shape[0]

    @property
    def device(self) -> torch.device:
        return self.raw.device

    def argmax(self) -> list[int]:
        """Best token of each row; the lowest id among equals, NO_TOKEN if it is not finite."""
        return _argmax(self.raw)

    def logits(self) -> Tensor:
        """float32 [rows, vocab_size]."""
        return self.raw.float()


class Verdict(NamedTuple):
    """The target's decision about one draft. `bonus_token` is None only if a stop cut the round."""

    accepted: tuple[int, ...]
    bonus_token: int | None
    logprobs: tuple[TokenLogprob, ...] = ()
    """One entry per committed token if they were asked for, else empty."""

    @property
    def num_accepted(self) -> int:
        return len(self.accepted)

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Tokens that this round commits."""
        return self.accepted if self.bonus_token is None else (*self.accepted, self.bonus_token)


AcceptanceRule = Callable[[LogitRows, Sequence[int], "Request"], Verdict]
"""(rows, draft tokens, request) -> verdict, not cut by stops. Row i follows the committed tokens
and the first i drafted ones. Pure: the same arguments give the same verdict."""


def sample_match(rows: LogitRows, draft_tokens: Sequence[int], request: Request) -> Verdict:
    """Accept the longest prefix of the draft that equals the target's own choices; the next choice
    is the bonus token.

    The one acceptance rule: exact for any drafter, since every committed token is the target's own
    choice, and it needs no draft probabilities. Noise belongs to positions, so a bonus token that a
    stop takes away has used up nothing."""
    choices = choose(rows, draft_tokens, request)
    num_accepted = common_prefix(draft_tokens, choices.token_ids)
    return Verdict(
        tuple(draft_tokens[:num_accepted]),
        choices.token_ids[num_accepted],
        choices.logprobs[: num_accepted + 1],
    )


def common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    """Length of the common prefix."""
    length = 0
    for a, b in zip(first, second, strict=False):
        if a != b:
            break
        length += 1
    return length


def choose(rows: LogitRows, draft_tokens: Sequence[int], request: Request) -> Choices:
    """The target's own choice at every row, up to and including the first that differs from the
    draft; later rows may follow.

    `request` is not changed; if its parameters use counts it must carry `counts` of this vocabulary
    on this device. Raises ValueError for a wrong number of rows, or missing counts, and NotFinite
    if one of these rows has no finite best logit."""
    num_rows = len(draft_tokens) + 1
    if len(rows) != num_rows:
        raise ValueError(
            f"{num_rows - 1} drafted tokens need {num_rows} rows of logits, got {len(rows)}"
        )
    if _is_plain_argmax(request):
        return _finite(Choices(rows.argmax()), draft_tokens, request)
    logits = rows.logits()
    rows_at_once = 1 if rows.device.type in _ROW_BY_ROW else num_rows
    token_ids: list[int] = []
    logprobs: tuple[TokenLogprob, ...] = ()
    for first_row in range(0, num_rows, rows_at_once):
        scores = processed_logits(
            logits[first_row : first_row + rows_at_once], first_row, draft_tokens, request
        )
        choices = _choose_rows(scores, first_row, request)
        token_ids += choices.token_ids
        logprobs += choices.logprobs
        if token_ids != list(draft_tokens[: len(token_ids)]):
            break
    return _finite(Choices(token_ids, logprobs), draft_tokens, request)


def _finite(choices: Choices, draft_tokens: Sequence[int], request: Request) -> Choices:
    # rows after a rejected token don't count: plain decoding would not have computed them
    row = common_prefix(choices.token_ids, draft_tokens)
    if choices.token_ids[row] == NO_TOKEN:
        where = "the verify pass" if request.num_rounds else "the prefill"
        raise NotFinite("the target's logits are", where, len(request) + row)
    return choices


def _argmax(scores: Tensor) -> list[int]:
    best = scores.max(dim=-1)
    token_ids: list[int] = best.indices.where(best.values.isfinite(), NO_TOKEN).tolist()
    return token_ids


def _is_plain_argmax(request: Request) -> bool:
    params = request.params
    unprocessed = (
        not params.uses_counts
        and not params.logit_bias
        and params.min_tokens <= request.num_answer_tokens
    )
    return params.greedy and unprocessed and params.logprobs is None


def _choose_rows(scores: Tensor, first_row: int, request: Request) -> Choices:
    params = request.params
    if params.greedy:
        token_ids = _argmax(scores)
    else:
        scores = _keep_likely(scores, params)
        first_position = len(request) + first_row
        noise = [uniform(request.seed, first_position + row) for row in range(scores.shape[0])]
        token_ids = inverse_cdf(scores.softmax(dim=-1), noise)
    if params.logprobs is None:
        return Choices(token_ids)
    return Choices(token_ids, token_logprobs(scores, token_ids, params.logprobs))


def choice_gap(logits: Tensor, request: Request, other: int | None = None) -> float:
    """Distance of the target's choice after `request` from `other` (None: from any other token).

    logits: float32 [vocab_size] or [1, vocab_size]. Greedy: best processed logit minus the other's,
    relative to max(1, |best|). Sampling: distance of the uniform number to the other's interval in
    the cumulative distribution (None: to the nearer end of the chosen token's interval); shifts of
    a top-k, top-p or min-p cutoff by rounding are ignored. 0 if `other` is the choice, infinite if
    it is impossible."""
    params = request.params
    scores = processed_logits(logits.reshape(1, -1), 0, (), request)
    if params.greedy:
        best, second = scores.topk(2).values[0].tolist()
        return float(
            (best - (second if other is None else float(scores[0, other]))) / max(1.0, abs(best))
        )
    probabilities = _keep_likely(scores, params).softmax(dim=-1)
    point = uniform(request.seed, len(request))
    (token_id,) = inverse_cdf(probabilities, [point])
    if token_id == other:
        return 0.0
    if other is not None and float(probabilities[0, other]) == 0.0:
        return math.inf
    cumulative = probabilities[0].cumsum(0, dtype=torch.float64)
    cumulative = cumulative / cumulative[-1]
    place = token_id if other is None else other
    lower, upper = float(cumulative[place - 1]) if place else 0.0, float(cumulative[place])
    return min(abs(point - lower), abs(upper - point))


def processed_logits(
    logits: Tensor,
    first_row: int,
    draft_tokens: Sequence[int],
    request: Request,
) -> Tensor:
    """Apply steps 1 to 4 to the rows of a block from `first_row` on: float32 [rows, vocab_size];
    returns `logits` itself if no step applies."""
    params = request.params
    scores = logits
    if params.uses_counts:
        scores = _penalise(scores, first_row, draft_tokens, request)
    if params.logit_bias:
        ids = torch.tensor(list(params.logit_bias), device=logits.device)
        values = torch.tensor(
            list(params.logit_bias.values()), dtype=scores.dtype, device=logits.device
        )
        scores = scores.index_add(1, ids, values.expand(scores.shape[0], -1))
    num_banned_rows = params.min_tokens - request.num_answer_tokens - first_row
    if num_banned_rows > 0:
        banned = set(params.stop_token_ids) | (
            set() if params.ignore_eos else request.eos_token_ids
        )
        scores = scores.clone()
        scores[:num_banned_rows, sorted(banned)] = -math.inf
    return scores


def _penalise(
    logits: Tensor, first_row: int, draft_tokens: Sequence[int], request: Request
) -> Tensor:
    params, counts = request.params, request.counts
    if counts is None:
        raise ValueError(
            "the penalties need request.counts: set them before the first token is chosen"
        )
    drafted = torch.zeros(logits.shape, dtype=torch.int32, device=logits.device)
    rows, columns = torch.tril_indices(
        logits.shape[0], len(draft_tokens), offset=first_row - 1, device=logits.device
    )
    ids = torch.tensor(list(draft_tokens), dtype=torch.long, device=logits.device)[columns]
    drafted.index_put_((rows, ids), torch.ones_like(rows, dtype=torch.int32), accumulate=True)
    in_answer = drafted + counts.answer
    scores = logits
    if params.repetition_penalty != 1.0:
        seen = (in_answer > 0) | (counts.prompt > 0)
        penalised = torch.where(
            scores > 0, scores / params.repetition_penalty, scores * params.repetition_penalty
        )
        scores = torch.where(seen, penalised, scores)
    return scores - params.presence_penalty * (in_answer > 0) - params.frequency_penalty * in_answer


def _keep_likely(scores: Tensor, params: SamplingParams) -> Tensor:
    """Apply steps 5 to 8: logits of the distribution to sample from, float32 [rows, vocab_size],
    -inf for impossible tokens."""
    # The best becomes 0 first: the quotient can't overflow upwards then, however low the
    # temperature.
    scores = (scores - scores.amax(dim=-1, keepdim=True)) / params.temperature
    if 0 < params.top_k < scores.shape[-1]:
        scores = _at_least(scores, scores, scores.topk(params.top_k).values[:, -1:])
    if params.top_p < 1.0:
        scores = _keep_nucleus(scores, params.top_p)
    if params.min_p > 0.0:
        scores = scores.masked_fill(scores < math.log(params.min_p), -math.inf)
    return scores


def _keep_nucleus(scores: Tensor, top_p: float) -> Tensor:
    probabilities = scores.softmax(dim=-1)
    width = min(_NUCLEUS_WIDTH, probabilities.shape[-1])
    best = probabilities.topk(width).values
    cumulative = best.cumsum(dim=-1, dtype=torch.float64)
    if bool((cumulative[:, -1] < top_p).any()):
        best = probabilities.sort(dim=-1, descending=True).values
        cumulative = best.cumsum(dim=-1, dtype=torch.float64)
    # A token is kept while those before it have not reached p; the best one always is.
    num_kept = 1 + (cumulative[:, :-1] < top_p).sum(dim=-1, keepdim=True)
    return _at_least(scores, probabilities, best.gather(-1, num_kept - 1))


def _at_least(scores: Tensor, measure: Tensor, floor: Tensor) -> Tensor:
    return scores.masked_fill(measure < floor, -math.inf)


def inverse_cdf(probabilities: Tensor, noise: Sequence[float]) -> list[int]:
    """Token id of each row whose interval, in id order, contains that row's `noise` (in [0, 1]).

    `probabilities`: float32 [rows, vocab_size]; rows need not sum to one exactly. An id of
    probability 0 is never returned; a row of NaN, into which softmax turns what is not finite,
    gives NO_TOKEN."""
    cumulative = probabilities.cumsum(dim=-1, dtype=torch.float64)
    points = (
        torch.tensor(noise, dtype=torch.float64, device=probabilities.device)[:, None]
        * cumulative[:, -1:]
    )
    picks = torch.searchsorted(cumulative, points, right=True).clamp_(
        max=probabilities.shape[-1] - 1
    )
    token_ids: list[int] = picks[:, 0].tolist()
    for row, probability in enumerate(probabilities.gather(-1, picks)[:, 0].tolist()):
        if probability <= 0.0:  # noise rounded up to the total, or a sum that is not quite monotone
            possible = probabilities[row].nonzero()[:, 0]
            before = possible[possible < token_ids[row]]
            token_ids[row] = int(before[-1] if len(before) else possible[0])
        elif math.isnan(probability):
            token_ids[row] = NO_TOKEN
    return token_ids


def token_logprobs(
    scores: Tensor, token_ids: Sequence[int], num_top: int
) -> tuple[TokenLogprob, ...]:
    """Log-probabilities of one token per row, and of the row's best. scores: float32 [rows,
    vocab_size]. A list of alternatives always includes
    the chosen one, so it may have one entry more."""
    logprobs = scores.log_softmax(dim=-1)
    ids = torch.tensor(list(token_ids), device=scores.device).clamp(
        min=0
    )  # NO_TOKEN is dropped later
    chosen = logprobs.gather(-1, ids[:, None])[:, 0].tolist()
    values, ids = logprobs.topk(min(num_top, scores.shape[-1]))
    entries = []
    for token_id, logprob, row_ids, row_values in zip(
        token_ids, chosen, ids.tolist(), values.tolist(), strict=True
    ):
        top = {
            other: value
            for other, value in zip(row_ids, row_values, strict=True)
            if value > -math.inf
        }
        if num_top:
            top[token_id] = logprob
        entries.append(
            TokenLogprob(
                token_id, logprob, tuple(sorted(top.items(), key=lambda item: (-item[1], item[0])))
            )
        )
    return tuple(entries)
