"""Request: its tokens, sampling parameters and stops."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from d3d.engine.drafter import Draft
from d3d.engine.noise import fresh_seed
from d3d.engine.round import FinishReason, Round, RoundTimes
from d3d.engine.sampling import SamplingParams, TokenCounts, Verdict, validate_params
from d3d.engine.text import StopScanner
from d3d.errors import InvalidRequest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from d3d.engine.drafter import Target

_ids = itertools.count()


class Request:
    """A prompt and its committed answer. Only `commit` extends the answer.

    Targets, caches and drafters keep per-request state under its `id`, until the engine ends it."""

    def __init__(
        self,
        prompt_ids: list[int],
        params: SamplingParams | None = None,
        *,
        seed: int = 0,
        max_length: int | None = None,
        eos_token_ids: frozenset[int] = frozenset(),
        tokenizer: PreTrainedTokenizerFast | None = None,
    ) -> None:
        """Without a tokenizer it yields ids and no text; `new_request` also checks arguments.
        Raises InvalidRequest if the prompt leaves no room in `max_length`, or stop strings have no
        tokenizer."""
        self.id = next(_ids)
        self.token_ids = list(prompt_ids)
        self.prompt_length = len(prompt_ids)
        self.params = params or SamplingParams()
        self.seed = seed
        self.eos_token_ids = eos_token_ids
        self.scanner = StopScanner(
            self.params,
            prompt_length=self.prompt_length,
            max_length=max_length,
            eos_token_ids=eos_token_ids,
            tokenizer=tokenizer,
        )
        self.counts: TokenCounts | None = None
        self.num_rounds = 0
        self.finish_reason: FinishReason | None = None
        self.error: Exception | None = None
        """Error that the request failed with; finish_reason is None then."""

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def anchor(self) -> int:
        """The last committed token."""
        return self.token_ids[-1]

    @property
    def num_answer_tokens(self) -> int:
        return len(self.token_ids) - self.prompt_length

    @property
    def answer_ids(self) -> list[int]:
        return self.token_ids[self.prompt_length :]

    @property
    def finished(self) -> bool:
        """True if the request has finished, failed or been cancelled."""
        return self.finish_reason is not None or self.error is not None

    def draft_room(self, max_draft_length: int) -> int:
        """Number of tokens worth drafting now. A bonus token follows the draft, so the answer's
        last token needs none."""
        return max(0, min(max_draft_length, self.scanner.remaining - 1))

    def commit(self, draft: Draft, verdict: Verdict, times: RoundTimes) -> Round:
        """Extend the answer by a verdict, cut at a stop."""
        scan = self.scanner.scan(verdict)
        verdict = scan.verdict
        self.token_ids.extend(verdict.token_ids)
        if self.counts is not None:
            self.counts.add(verdict.token_ids)
        self.finish_reason = scan.finish_reason
        number, self.num_rounds = self.num_rounds, self.num_rounds + 1
        draft_length = draft.depth
        return Round(
            draft_length,
            verdict.num_accepted,
            len(verdict.token_ids),
            times.t_draft,
            times.t_verify,
            times.started,
            draft.preparation,
            times.device_span,
            draft.looked_up,
            draft.num_slots,
            self.id,
            number,
            verdict.token_ids,
            scan.text,
            scan.finish_reason,
            verdict.logprobs,
            draft.fault,
            len(draft.token_ids) - draft_length,
        )


def new_request(
    target: Target,
    prompt_ids: list[int],
    params: SamplingParams,
    *,
    eos_token_ids: frozenset[int] = frozenset(),
    tokenizer: PreTrainedTokenizerFast | None = None,
) -> Request:
    """Create a checked request. Without a tokenizer it yields ids and no text.

    Raises InvalidRequest for an empty or too long prompt, ids outside the target's vocabulary, and
    impossible parameters."""
    if not prompt_ids:
        raise InvalidRequest("prompt: it is empty; give at least one token")
    for token_id in (min(prompt_ids), max(prompt_ids)):
        if not 0 <= token_id < target.vocab_size:
            raise InvalidRequest(
                f"prompt: token id {token_id} is not in the target's vocabulary "
                f"(0 to {target.vocab_size - 1})"
            )
    validate_params(params, target.vocab_size)
    ends = frozenset() if params.ignore_eos else eos_token_ids
    if params.min_tokens and len(ends.union(params.stop_token_ids)) >= target.vocab_size:
        raise InvalidRequest(
            f"min_tokens: {params.min_tokens} tokens can't come before the first that ends the "
            "answer, since every token ends it; give fewer stop_token_ids"
        )
    request = Request(
        prompt_ids,
        params,
        seed=fresh_seed() if params.seed is None else params.seed,
        max_length=target.max_length,
        eos_token_ids=eos_token_ids,
        tokenizer=tokenizer,
    )
    if params.uses_counts:
        request.counts = TokenCounts(prompt_ids, target.vocab_size, target.device)
    return request
