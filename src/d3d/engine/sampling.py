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
remembered, so a rejected token leaves no trace.

Drafted tokens form a tree of which a chain is the simplest: `parents[i]` is the index of the token
that token i follows, -1 for the anchor. None means a chain, in which each follows the one before
it. Row i + 1 stands for token i, after its ancestors; row 0 for the anchor."""

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
    path: tuple[int, ...] = ()
    """Indices of the drafted tokens on the way, if they form a tree."""


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
    path: tuple[int, ...] = ()
    """Indices of the accepted tokens in a draft tree; empty for a chain, whose first are kept."""

    @property
    def num_accepted(self) -> int:
        return len(self.accepted)

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Tokens that this round commits."""
        return self.accepted if self.bonus_token is None else (*self.accepted, self.bonus_token)


Parents = tuple[int, ...] | None
"""Parent of each drafted token; see above."""

AcceptanceRule = Callable[[LogitRows, Sequence[int], "Request", Parents], Verdict]
"""(rows, draft tokens, request, parents) -> verdict, not cut by stops. Pure: the same arguments
give the same verdict."""


def sample_match(
    rows: LogitRows, draft_tokens: Sequence[int], request: Request, parents: Parents = None
) -> Verdict:
    """Accept the path of the draft that equals the target's own choices; the next choice is the
    bonus token.

    The one acceptance rule: exact for any drafter, since every committed token is the target's own
    choice, and it needs no draft probabilities. Noise belongs to positions, so a bonus token that a
    stop takes away has used up nothing."""
    token_ids, logprobs, path = choose(rows, draft_tokens, request, parents)
    return Verdict(tuple(token_ids[:-1]), token_ids[-1], logprobs, path)


def common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    """Length of the common prefix."""
    length = 0
    for a, b in zip(first, second, strict=False):
        if a != b:
            break
        length += 1
    return length


def choose(
    rows: LogitRows, draft_tokens: Sequence[int], request: Request, parents: Parents = None
) -> Choices:
    """The target's own choices from the anchor on, as long as they were drafted, and the next one.
    Of equal siblings the first counts.

    `request` is not changed; if its parameters use counts it must carry `counts` of this vocabulary
    on this device. Raises ValueError for a wrong number of rows, or missing counts, and NotFinite
    if one of these rows has no finite best logit."""
    num_rows = len(draft_tokens) + 1
    if len(rows) != num_rows:
        raise ValueError(
            f"{num_rows - 1} drafted tokens need {num_rows} rows of logits, got {len(rows)}"
        )
    if _is_plain_argmax(request):
        every: Choices | None = Choices(rows.argmax())
    elif rows.device.type in _ROW_BY_ROW:
        every, logits = None, rows.logits()
    else:
        every = _choose_rows(rows.logits(), _histories(draft_tokens, parents), request)
    token_ids: list[int] = []
    logprobs: tuple[TokenLogprob, ...] = ()
    path: list[int] = []
    row: int | None = 0
    while row is not None:
        if every is None:
            choice = _choose_rows(logits[row : row + 1], [token_ids], request)
            logprobs += choice.logprobs
            token_id = choice.token_ids[0]
        else:
            logprobs += every.logprobs[row : row + 1]
            token_id = every.token_ids[row]
        token_ids.append(token_id)
        if parents is None:
            row = row + 1 if row < num_rows - 1 and draft_tokens[row] == token_id else None
        elif (node := _child(draft_tokens, parents, row - 1, token_id)) is not None:
            path.append(node)
            row = node + 1
        else:
            row = None
    if token_ids[-1] == NO_TOKEN:
        where = "the verify pass" if request.num_rounds else "the prefill"
        raise NotFinite("the target's logits are", where, len(request) + len(token_ids) - 1)
    return Choices(token_ids, logprobs, tuple(path))


def _child(
    draft_tokens: Sequence[int], parents: Sequence[int], parent: int, token_id: int
) -> int | None:
    """Index of the drafted token `token_id` that follows `parent`; None if there is none."""
    for node in range(parent + 1, len(parents)):
        if parents[node] == parent and draft_tokens[node] == token_id:
            return node
    return None


def _histories(draft_tokens: Sequence[int], parents: Parents) -> list[tuple[int, ...]]:
    """Drafted tokens that each row follows, its own included."""
    histories: list[tuple[int, ...]] = [()]
    for node, token_id in enumerate(draft_tokens):
        parent = node - 1 if parents is None else parents[node]
        histories.append((*histories[parent + 1], token_id))
    return histories


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


def _choose_rows(logits: Tensor, histories: Sequence[Sequence[int]], request: Request) -> Choices:
    """Choose at rows of float32 logits. histories: drafted tokens that each of them follows."""
    params = request.params
    scores = processed_logits(logits, histories, request)
    if params.greedy:
        token_ids = _argmax(scores)
    else:
        scores = keep_likely(scores, params)
        noise = [uniform(request.seed, len(request) + len(history)) for history in histories]
        token_ids = inverse_cdf(scores.softmax(dim=-1), noise)
    if params.logprobs is None:
        return Choices(token_ids)
    return Choices(token_ids, token_logprobs(scores, token_ids, params.logprobs))


def processed_logits(
    logits: Tensor, histories: Sequence[Sequence[int]], request: Request
) -> Tensor:
    """Apply steps 1 to 4 to rows: float32 [rows, vocab_size]; returns `logits` itself if no step
    applies. histories: drafted tokens that each row follows."""
    params = request.params
    scores = logits
    if params.uses_counts:
        scores = _penalise(scores, histories, request)
    if params.logit_bias:
        ids = torch.tensor(list(params.logit_bias), device=logits.device)
        values = torch.tensor(
            list(params.logit_bias.values()), dtype=scores.dtype, device=logits.device
        )
        scores = scores.index_add(1, ids, values.expand(scores.shape[0], -1))
    missing = params.min_tokens - request.num_answer_tokens
    if short := [row for row, history in enumerate(histories) if len(history) < missing]:
        banned = set(params.stop_token_ids) | (
            set() if params.ignore_eos else request.eos_token_ids
        )
        scores = scores.clone()
        for row in short:
            scores[row, sorted(banned)] = -math.inf
    return scores


def _penalise(logits: Tensor, histories: Sequence[Sequence[int]], request: Request) -> Tensor:
    params, counts = request.params, request.counts
    if counts is None:
        raise ValueError(
            "the penalties need request.counts: set them before the first token is chosen"
        )
    drafted = torch.zeros(logits.shape, dtype=torch.int32, device=logits.device)
    pairs = [(row, token_id) for row, history in enumerate(histories) for token_id in history]
    if pairs:
        rows, ids = torch.tensor(pairs, device=logits.device).unbind(1)
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


def keep_likely(scores: Tensor, params: SamplingParams) -> Tensor:
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
    vocab_size]. A list of alternatives always includes the chosen one, so it may have one entry
    more."""
    logprobs = scores.log_softmax(dim=-1)
    chosen_ids = [max(0, token_id) for token_id in token_ids]  # NO_TOKEN is dropped later
    ids = torch.tensor(chosen_ids, device=scores.device)
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
